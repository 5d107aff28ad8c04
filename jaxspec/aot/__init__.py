"""What compiled programs do, as the compiler for NVIDIA GPUs leaves them, on machines that have none."""
