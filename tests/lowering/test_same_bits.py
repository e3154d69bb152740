"""The comparison that the laws of layouts use: it finds a difference, and NaN is no difference in any float."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.lowering.programs import same_bits


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_nan_equals_nan_in_every_float(dtype: type):
    x = np.array([np.nan, 0.0, 1.0], dtype)
    assert same_bits([x], [x.copy()])
    assert not same_bits([x], [np.array([np.nan, 0.0, 2.0], dtype)])
    assert not same_bits([x], [np.array([1.0, 0.0, 1.0], dtype)])
