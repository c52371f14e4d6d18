"""The example that trains a layer from a checkpoint."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import port_checkpoint
from anabranch.checkpoints import load


def test_ends_with_what_it_checked(capsys):
    port_checkpoint.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Checked: the loss of layer 1 fell from ")


def test_trains_the_layer_and_no_other(tmp_path):
    source, destination = tmp_path / "source", tmp_path / "destination"
    port_checkpoint.write_checkpoint(source, layers=3)
    block, before, after = port_checkpoint.train_layer(source, destination, layer=1)
    old, new = load_file(source), load_file(destination)
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert changed == {name for name in old if name.startswith("model.layers.1.mlp.")}
    assert after < before
    w_in = load(port_checkpoint.FAMILY, new, "model.layers.1.mlp.").experts["w_in"]
    np.testing.assert_array_equal(w_in, block.experts["w_in"])


def test_a_file_without_the_layer_is_an_error_that_names_it(tmp_path):
    save_file({"model.layers.0.mlp.router.weight": np.zeros((4, 8), np.float32)}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.router\.weight: got no such tensor"):
        port_checkpoint.train_layer(tmp_path / "file", tmp_path / "out", layer=1)
