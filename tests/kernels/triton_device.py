"""The device of the Triton tests: a GPU if there is one, else the CPU with Triton's interpreter (tests/conftest.py).

The interpreter runs one program at a time with numpy, so shapes must be small: a few tiles of 16 × 16. Its bfloat16
products are wrong: test with float32 and float16.
"""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed; its wheels are for Linux")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    pytest.skip(
        "before 3.9, triton's interpreter does not accept scalars of current numpy versions", allow_module_level=True
    )
