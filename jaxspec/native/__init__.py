"""Products with packed weights and attention on the CPU, in C: at the speed of memory, the same for any number of rows."""
