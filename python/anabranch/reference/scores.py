"""Scores of the router in numpy float64: softmax, sigmoid and sqrt(softplus). Semantics, section 1."""

import numpy as np

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
SQRTSOFTPLUS_TAIL = -20.0  # below it, sqrt(softplus(z)) is computed as exp(z/2)


def as_float64(array, name="array"):
    """`array` as float64. Accepts ml_dtypes' bfloat16, refuses integers and bools."""
    array = np.asarray(array)
    if array.dtype.kind not in "fV":
        raise TypeError(f"{name}: got dtype {array.dtype}, expected a floating dtype")
    return array.astype(np.float64)


def logsumexp(logits):
    """log sum_e exp z_e over the last axis, as max z + log sum exp(z - max z).

    NaN if a row contains NaN or +inf, or only -inf.
    """
    z = as_float64(logits, "logits")
    top = z.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (top + np.log(np.exp(z - top).sum(axis=-1, keepdims=True)))[..., 0]


def _sigmoid(z):
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-z))


def _sqrtsoftplus(z):
    softplus = np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z)))
    tail = np.exp(np.minimum(z, SQRTSOFTPLUS_TAIL) / 2)
    return np.where(z < SQRTSOFTPLUS_TAIL, tail, np.sqrt(softplus))


def scores(logits, score_function):
    """s of section 1: softmax over E, sigmoid, or sqrt(softplus). float64[..., E]."""
    z = as_float64(logits, "logits")
    if score_function == "softmax":
        with np.errstate(invalid="ignore"):
            return np.exp(z - logsumexp(z)[..., None])
    if score_function == "sigmoid":
        return _sigmoid(z)
    if score_function == "sqrtsoftplus":
        return _sqrtsoftplus(z)
    raise ValueError(f"score_function: got {score_function!r}, expected one of {SCORE_FUNCTIONS}")


def score_gradient(logits, score_function):
    """s'(z) of the two elementwise score functions. float64[..., E].

    sigmoid: s (1 - s).  sqrtsoftplus: sigmoid(z) / (2 s), and s/2 for z < -20.  Both are 0 at -inf.
    """
    z = as_float64(logits, "logits")
    if score_function == "sigmoid":
        return _sigmoid(z) * _sigmoid(-z)
    if score_function == "sqrtsoftplus":
        s = _sqrtsoftplus(z)
        body = _sigmoid(z) / (2 * np.where(z < SQRTSOFTPLUS_TAIL, 1.0, s))
        return np.where(z < SQRTSOFTPLUS_TAIL, s / 2, body)
    raise ValueError(f"score_function: got {score_function!r}, expected 'sigmoid' or 'sqrtsoftplus'")
