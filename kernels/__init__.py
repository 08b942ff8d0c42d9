"""CUDA sources, one ``.cu`` for each kernel; installed as the package ``cupy_coll.kernels``."""
