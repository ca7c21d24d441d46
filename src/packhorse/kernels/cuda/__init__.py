"""CUDA C++ kernels: described and compiled in `nvrtc.py`, loaded and launched in `launch.py`; shared headers."""
