"""Products with packed weights on the CPU, in C: as fast as memory is read, and the same for any number of rows."""
