"""The inverse of the normal distribution function in float64, by steps whose bits no machine changes.

Ref: Wichura 1988, "Algorithm AS 241: the percentage points of the normal distribution", routine PPND16 (relative error
about 1e-16).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Highest power first: central region, then the two tails.
CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip


NEAR = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip


FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def rational(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    """The quotient of two polynomials at x, by Horner's rule."""
    values = []
    for poly in coefficients:
        value = x * poly[0] + poly[1]
        for c in poly[2:]:
            value = value * x + c
        values.append(value)
    return values[0] / values[1]


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive float64 values by exact steps only, absolute error below 1e-14 |log x| + 1e-15."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [1/2, 1)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = (exponent - low.to(torch.int32)).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)  # |s| <= 0.1716: log m = 2 artanh s
    s2 = s * s
    series = torch.full_like(s, 1.0 / 19.0)
    for k in range(17, 0, -2):
        series = series * s2 + 1.0 / k
    return exponent * math.log(2.0) + 2.0 * s * series


def sqrt(x: Tensor) -> Tensor:
    """Square root of positive float64 values, rounded to nearest; torch's own (MKL) is wrong in the last bit for one
    value in 170.
    """
    root = torch.sqrt(x)
    # The remainder x - root^2, computed exactly from the root's two halves of 26 bits (Dekker's splitting).
    high = root * 134217729.0
    high = high - (high - root)
    low = root - high
    rest = ((x - high * high) - 2.0 * high * low) - low * low
    return root + rest / (2.0 * root)


def ndtri(p: Tensor) -> Tensor:
    """The standard normal values below which lies the fraction p of the distribution; float64, p in (0, 1)."""
    q = p - 0.5
    centre = q * rational(CENTRE, 0.180625 - q * q)
    r = sqrt(-log(torch.where(q < 0, p, 1.0 - p)))
    tail = torch.where(r <= 5.0, rational(NEAR, r - 1.6), rational(FAR, r - 5.0))
    return torch.where(q.abs() <= 0.425, centre, torch.where(q < 0, -tail, tail))
