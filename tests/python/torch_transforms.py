"""Checks of functions under torch's transforms: torch.compile, torch.func, checkpoints, strides.

`operands` is a function that returns the function's tensors, the same values on every call.
"""

import numpy as np
import torch
import torch._dynamo.testing


def normal(*shape, seed=0, scale=1.0):
    values = scale * np.random.default_rng(seed).standard_normal(shape)
    return torch.tensor(values, dtype=torch.float32)


def gradients(function, arguments):
    leaves = [a.detach().clone().requires_grad_() for a in arguments]
    value = function(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves)


def assert_close(got, want, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def check_compiled(function, operands):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    assert_close(gradients(compiled, operands()), gradients(function, operands()))


def check_compiled_once(function, operands):
    """One compilation serves every number of tokens."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    compilations = set()
    for tokens in (24, 17, 40):
        assert_close(gradients(compiled, operands(tokens)), gradients(function, operands(tokens)))
        compilations.add(counter.frame_count)
    assert len(compilations) == 1


def check_grad_and_vmap(function, arguments, batched):
    """torch.func.grad, and vmap of it over the argument of index `batched`, along axis 1."""
    value, want = gradients(function, arguments)
    got, got_value = torch.func.grad_and_value(function, argnums=tuple(range(len(arguments))))(*arguments)
    assert_close((got_value, got), (value, want))

    def with_batched(argument):
        return [argument if i == batched else a for i, a in enumerate(arguments)]

    slices = [scale * arguments[batched] for scale in (1.0, -0.5, 2.0)]
    in_dims = tuple(1 if i == batched else None for i in range(len(arguments)))
    mapped = torch.func.vmap(torch.func.grad(function, argnums=batched), in_dims=in_dims, out_dims=1)
    want = torch.stack([gradients(function, with_batched(a))[1][batched] for a in slices], 1)
    assert_close(mapped(*with_batched(torch.stack(slices, 1))), want)


def check_second_derivative_raises(function, operands):
    leaves = [a.requires_grad_() for a in operands()]
    gradient = torch.autograd.grad(function(*leaves), leaves, create_graph=True)[1]
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        assert "double backward is unsupported" in str(error)
    else:
        raise AssertionError("no error")


def check_frozen(function, operands, frozen):
    """Operands that need no gradient get none, and do not change the other operands' gradients."""
    _, want = gradients(function, operands())
    leaves = [a if i in frozen else a.requires_grad_() for i, a in enumerate(operands())]
    function(*leaves).backward()
    for i, (leaf, gradient) in enumerate(zip(leaves, want, strict=True)):
        assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, gradient), i


def check_strided(function, operands):
    strided = [a.transpose(0, 1).contiguous().transpose(0, 1) for a in operands()]
    assert not any(a.is_contiguous() for a in strided)
    assert_close(gradients(function, strided), gradients(function, operands()))
