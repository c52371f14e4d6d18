"""Options of the training example. tests/python/parallel trains it on meshes."""

import pytest

from jax_train.config import parse


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-experts=0"], "--num-experts: got 0, expected a number from 1 to 2147483647"),
        (["--num-experts-per-tok=9"], "--num-experts-per-tok: got 9, expected at most 8"),
        (["--base-num-query-heads=3"], "--base-num-query-heads: got 3, expected an even width of a head, 128 / heads"),
        (["--remat-policy=moe_h,h"], "--remat-policy: got 'h', expected none, full, or names of moe_x, moe_logits, "),
        (["--ragged-buffer-factor=0", "--mesh=expert=2"], "got 0.0, expected -1 or a number above 0"),
        (["--ragged-buffer-factor=1.5"], "got 1.5, expected -1 without --mesh or with --moe ragged_dot"),
        (["--prefuse-moe-weights=yes"], "argument --prefuse-moe-weights: got 'yes', expected true or false"),
        (["--mesh=tensor=2"], "--mesh: got 'tensor=2', expected the axes data and expert alone"),
        (["--mesh=expert=3"], "--global-batch-size: got 16, expected a multiple of 3 for --mesh expert=3"),
        (["--mesh=expert=16"], "--num-experts: got 8, expected a multiple of 16"),
    ],
)
def test_bad_options_are_refused_with_what_was_expected(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
