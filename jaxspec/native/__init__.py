"""Products with packed weights and attention on the CPU, in C: as fast as memory is read, the same for any rows."""
