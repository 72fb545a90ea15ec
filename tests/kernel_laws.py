"""What must hold of every kernel, each law stated once. On a CUDA device the kernels run there; elsewhere in Triton's
interpreter.

A law is given `f(impl, *tensors)`: the operation by the form `impl` of its differentiable tensors, everything else
closed over."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import triton
from close import assert_close, assert_same
from kernel_races import watched_programs

from fzero.core import vjp_pair
from fzero.kernels.float8 import cpu_lacks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = triton.knobs.runtime.interpret


def round_as_the_hardware_does():
    """The interpreter truncates float32 to bfloat16 and to float8's subnormals; GPUs round to nearest even."""
    from triton import language as tl
    from triton.runtime import interpreter

    narrow = {
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8, np.uint8),
    }

    def rounding(cast):
        def cast_rounding(self, src, dst_type, *mode):
            if src.dtype.scalar != tl.float32 or dst_type.scalar not in narrow or "RTZ" in repr(mode):
                return cast(self, src, dst_type, *mode)
            dtype, bits, stored = narrow[dst_type.scalar]
            rounded = torch.from_numpy(np.array(src.data, dtype=np.float32, order="C")).to(dtype)
            return interpreter.TensorHandle(rounded.view(bits).numpy().view(stored), dst_type.scalar)

        return cast_rounding

    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(interpreter.InterpreterBuilder, name, rounding(getattr(interpreter.InterpreterBuilder, name)))


def patch_once():
    """The interpreter replaces all of triton.language again at each call of a function in a kernel, for a third of its
    time."""
    from triton.language import core
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_lang(fn):
        if not any(
            core.is_builtin(module.load)
            for module in fn.__globals__.values()
            if module is core or module is triton.language
        ):
            return interpreter._LangPatchScope()
        scope = patch(fn)
        scope.set_attr(
            core.tensor, "__index__", lambda self: int(self.handle.data.item())
        )  # Triton 3.6 fails with NumPy 2.4
        return scope

    interpreter._patch_lang = patch_lang


if INTERPRETED:
    round_as_the_hardware_does()
    patch_once()
    np.seterr(all="ignore")  # a GPU does not warn of exp(100) either


def skip_without_float8(scaling, impl="scaled_mm"):
    """Skip where this CPU has no such float8 products, as an old one, or that of PyTorch 2.11."""
    if impl == "scaled_mm" and DEVICE == "cpu" and cpu_lacks(scaling):
        pytest.skip(cpu_lacks(scaling))


def draw(*shapes, dtype=torch.float64, seed=0, device=DEVICE):
    """Normal values, one tensor for each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def tuple_of(out):
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def both_passes(f, tensors, seed=1):
    """(results, gradients) of `f(*tensors)` for random cotangents."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    outs = tuple_of(f(*leaves))
    cotangents = [c.to(o.dtype) for c, o in zip(draw(*(o.shape for o in outs), seed=seed), outs)]
    return [o.detach() for o in outs], list(torch.autograd.grad(outs, leaves, cotangents))


def numbers(f, tensors, dtype, impl="triton"):
    """Forward and backward are at most twice as far from the float64 values as plain torch in the same dtype; see
    at_most_twice."""
    given = [t.to(dtype) for t in tensors]
    exact = both_passes(lambda *t: f("reference", *t), [t.double() for t in given])
    plain = both_passes(lambda *t: f("reference", *t), given)
    ours = both_passes(lambda *t: f(impl, *t), given)
    for kind, wants, bases, gots in zip(("result", "gradient"), exact, plain, ours):
        for i, (want, base, got) in enumerate(zip(wants, bases, gots)):
            assert (got.dtype, got.shape) == (base.dtype, base.shape), f"{kind} {i}"
            if want.numel():
                at_most_twice(f"{kind} {i}", got, base, want)


def at_most_twice(what, got, base, want):
    """`got` is at most twice as far from `want` (float64) as `base`, in the root of the mean square and in the largest
    element.

    Beyond that half a unit of its dtype, and in float32 four: a GPU's exp and log are good to two.
    """
    unit = torch.finfo(got.dtype).eps * (4.0 if got.dtype == torch.float32 else 0.5)
    for size in (lambda x: float(x.double().square().mean().sqrt()), lambda x: float(x.double().abs().max())):
        error, plain = size(got.double() - want), size(base.double() - want)
        bound = 2.0 * plain + unit * size(want)
        assert error <= bound, f"{what}: error {error:g} above {bound:g}; plain torch's is {plain:g}"


def repeats(f, tensors, dtype=torch.float32, impl="triton"):
    """A second run gives the same bits; in the interpreter its programs are watched, in every order (kernel_races)."""
    given = [t.to(dtype) for t in tensors]
    first = both_passes(lambda *t: f(impl, *t), given)
    with watched_programs() if INTERPRETED else nullcontext():
        assert_same(both_passes(lambda *t: f(impl, *t), given), first)


def strides(f, tensors, dtype=torch.float32, impl="triton"):
    """Inputs with other strides give the bits of contiguous ones: the last dim strided, and rows apart."""
    given = [t.to(dtype) for t in tensors]
    expected = both_passes(lambda *t: f(impl, *t), given)
    for pad in (
        (lambda t: torch.stack((t, t + 1), -1)[..., 0]),
        (lambda t: torch.cat((t, t + 1), -1)[..., : t.shape[-1]]),
    ):
        apart = [pad(t) for t in given]
        assert all(t.numel() < 2 or not t.is_contiguous() for t in apart if t.dim() > 1)
        leaves = [t.detach().requires_grad_() for t in apart]
        outs = tuple_of(f(impl, *leaves))
        cotangents = [c.to(o.dtype) for c, o in zip(draw(*(o.shape for o in outs), seed=1), outs)]
        actual = [o.detach() for o in outs], list(torch.autograd.grad(outs, leaves, cotangents))
        assert_same(actual, expected)


def adjoint(f, tensors, impl="triton", rtol=1e-4):
    """<w, J v> = <J^T w, v>: J v by the reference in float64, J^T w by the kernel in float32."""
    given = [t.float() for t in tensors]
    v = draw(*(t.shape for t in given), seed=5)
    outs, jv = torch.func.jvp(lambda *t: tuple_of(f("reference", *t)), tuple(t.double() for t in given), tuple(v))
    w = [x.float() for x in draw(*(o.shape for o in outs), seed=6)]
    leaves = [t.requires_grad_() for t in given]
    pulled = torch.autograd.grad(tuple_of(f(impl, *leaves)), leaves, w)
    left = sum(float((a.double() * b).sum()) for a, b in zip(w, jv))
    right = sum(float((a.double() * b).sum()) for a, b in zip(pulled, v))
    size = sum(float((a.double() * b).abs().sum()) for a, b in zip(w, jv))
    assert abs(left - right) <= rtol * size / max(1, sum(o.numel() for o in outs)) ** 0.5, (left, right, size)


def derivatives(f, tensors):
    """First and second derivatives of the function that users call ("auto"), in float64, against finite differences."""
    leaves = [t.double().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: f("auto", *t), leaves)
    assert torch.autograd.gradgradcheck(lambda *t: f("reference", *t), leaves)


def transforms(f, tensors, impl="triton", rtol=1e-4):
    """torch.func.grad gives the bits of backward(); vmap and second derivatives go by the reference, and forced they
    say why not."""
    given = [t.float() for t in tensors]

    def total(impl, *t):
        outs = tuple_of(f(impl, *t))
        return sum((o.float() * c.float()).sum() for o, c in zip(outs, draw(*(o.shape for o in outs), seed=1)))

    which = tuple(range(len(given)))
    ours = torch.func.grad(lambda *t: total(impl, *t), argnums=which)(*given)
    assert_same(list(ours), both_passes(lambda *t: f(impl, *t), given)[1])

    def squares(impl, *t):
        return sum(g.square().sum() for g in torch.func.grad(lambda *u: total(impl, *u), argnums=which)(*t))

    second, expected = (
        torch.func.grad(lambda *t, k=k: squares(k, *t), argnums=which)(*given) for k in ("auto", "reference")
    )
    assert_close(list(second), list(expected), rtol=rtol, atol=rtol * max(float(x.abs().max()) for x in expected))
    with pytest.raises(ValueError, match=f"impl='{impl}' does not serve"):
        torch.func.grad(lambda *t: squares(impl, *t), argnums=which)(*given)


def traced(f, tensors, impl="triton"):
    """A joint graph of forward and backward pass holds the kernels as operators, and gives the same bits."""
    given = [t.float() for t in tensors]
    outs, grads = both_passes(lambda *t: f(impl, *t), given)
    pair = vjp_pair.vjp_pair(lambda *t: tuple_of(f(impl, *t)), len(given), compiled=False, budget=0.99)
    traced_outs, residuals = pair.forward(given)
    cotangents = [c.to(o.dtype) for c, o in zip(draw(*(o.shape for o in outs), seed=1), outs)]
    assert_same([list(traced_outs), list(pair.backward(residuals, cotangents))], [outs, grads])


def every_law(f, tensors, dtypes=(torch.float32, torch.bfloat16)):
    """All laws that take the same tensors, which must be small."""
    for dtype in dtypes:
        numbers(f, tensors, dtype)
    for law in (repeats, strides, adjoint, transforms, traced):
        law(f, tensors)


def far_apart(rows, columns, dtype, apart=(1 << 31) + 8):
    """A tensor [rows, columns] whose rows lie more than 2^31 elements apart, without memory between them."""
    return (
        torch.empty((rows - 1) * apart + columns, dtype=dtype, device=DEVICE)
        .as_strided((rows, columns), (apart, 1))
        .zero_()
    )
