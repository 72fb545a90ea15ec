"""The comparison that the other tests rely on."""

import pytest
import torch
from close import assert_at_most_twice_the_error, assert_close, assert_same
from kernel_laws import at_most_twice


def test_names_the_leaf_and_the_element_that_differ():
    want = {"a": torch.zeros(2), "b": {"c": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}}
    assert_close(want, want)
    with pytest.raises(
        AssertionError, match=r"leaf b/c: 1 of 4 elements differ; worst at \[1, 0\]: 3\.5, expected 3\.0"
    ):
        assert_close({"a": torch.zeros(2), "b": {"c": torch.tensor([[1.0, 2.0], [3.5, 4.0]])}}, want, rtol=1e-3)
    with pytest.raises(AssertionError, match="b/c"):
        assert_close({"a": torch.zeros(2)}, want)
    with pytest.raises(AssertionError, match=r"leaf a: shape \[1\], expected \[2\]"):
        assert_close({**want, "a": torch.zeros(1)}, want)
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_close({}, {})


def test_the_tolerances_are_what_they_say():
    one = torch.tensor([1.0, 100.0], dtype=torch.float64)
    assert_close(one * (1 + 0.9e-6), one, rtol=1e-6)
    assert_close(one + 0.9e-6, one, atol=1e-6)
    for factor, shift in ((1 + 1.1e-6, 0.0), (1.0, 1.1e-4)):
        with pytest.raises(AssertionError):
            assert_close(one * factor + shift, one, rtol=1e-6)


def test_an_atol_that_hides_the_result_is_refused():
    small = torch.tensor([1e-4, -2e-4])
    with pytest.raises(ValueError, match=r"atol is 1e-05, above 1% of the largest expected value 0\.0002"):
        assert_close(small, small, atol=1e-5)
    assert_close(small, small, atol=1e-6)
    with pytest.raises(ValueError, match="largest expected value 0"):
        assert_close(torch.zeros(3), torch.zeros(3), atol=1e-12)


def test_nan_equals_nothing_and_infinity_itself():
    inf, nan = torch.tensor([float("inf"), 1.0]), torch.tensor([float("nan"), 1.0])
    assert_close(inf, inf)
    for a, e in ((nan, nan), (nan, inf), (inf, nan), (-inf, inf), (torch.ones(2), inf)):
        with pytest.raises(AssertionError):
            assert_close(a, e, rtol=1e-3)


def test_same_sees_one_bit_and_the_dtype():
    x = torch.tensor([1.0, 2.0])
    assert_same({"x": x}, {"x": x.clone()})
    with pytest.raises(AssertionError, match="leaf x: 1 of 2"):
        assert_same({"x": torch.nextafter(x, torch.tensor([9.0, 2.0]))}, {"x": x})
    with pytest.raises(AssertionError, match="float64"):
        assert_same({"x": x.double()}, {"x": x})


def test_twice_the_error():
    exact = torch.linspace(0.1, 1.0, 64, dtype=torch.float64)
    plain = exact.to(torch.bfloat16)
    assert_at_most_twice_the_error(plain, plain, exact)
    with pytest.raises(AssertionError, match="plain torch's"):
        assert_at_most_twice_the_error((exact * 1.01).to(torch.bfloat16), plain, exact)


def test_three_times_the_error_is_found_by_both_laws_in_one_element_too():
    exact = torch.linspace(0.1, 1.0, 64, dtype=torch.float64)
    error = torch.where(torch.arange(64) % 2 == 0, 1e-4, -1e-4)
    plain = (exact + error).float()
    for scale in (torch.full((64,), 3.0), torch.where(torch.arange(64) == 7, 3.0, 1.0)):  # the second: rms 1.06 times
        worse = (exact + scale * error).float()
        with pytest.raises(AssertionError, match="plain torch's"):
            assert_at_most_twice_the_error(worse, plain, exact)
        with pytest.raises(AssertionError, match="plain torch's"):
            at_most_twice("x", worse, plain, exact)
    fine = (exact + 1.9 * error).float()
    assert_at_most_twice_the_error(fine, plain, exact)
    at_most_twice("x", fine, plain, exact)
