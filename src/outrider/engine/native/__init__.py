"""The C kernels of the CPU path: built once with the machine's compiler, called through ctypes."""
