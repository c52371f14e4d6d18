import numpy as np
import pytest

from byte_lm.data import held_out_starts, load_corpus, stdlib_folder, training_batch, windows
from run_error import RunError


def files_of(text):
    return text.tobytes().split(b"\0")[:-1]


def test_no_text_is_on_both_sides_of_the_split(corpus_folder):
    corpus = load_corpus(corpus_folder)
    assert set(corpus.train_files).isdisjoint(corpus.held_out_files)
    train, held_out = files_of(corpus.train), files_of(corpus.held_out)
    assert set(train).isdisjoint(held_out)
    assert len(set(train)) == len(train) == len(corpus.train_files)
    assert len(set(held_out)) == len(held_out) == len(corpus.held_out_files)


def test_the_text_is_that_of_the_files(corpus_folder):
    corpus = load_corpus(corpus_folder)
    for text, names in ((corpus.train, corpus.train_files), (corpus.held_out, corpus.held_out_files)):
        assert files_of(text) == [(corpus_folder / name).read_bytes() for name in names]


def test_tests_packages_tables_empty_files_and_copies_are_excluded(corpus_folder):
    corpus = load_corpus(corpus_folder)
    names = corpus.train_files + corpus.held_out_files
    assert len(names) == 61
    assert sum("copy" in name for name in names) == 1
    assert not any(part in name for name in names for part in ("test", "site-packages", "encodings", "empty"))


def test_the_split_is_deterministic_and_a_new_file_moves_no_other(corpus_folder, tmp_path):
    first, again = load_corpus(corpus_folder), load_corpus(corpus_folder)
    assert first.held_out_files == again.held_out_files
    assert first.fingerprint == again.fingerprint
    for name in first.train_files + first.held_out_files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((corpus_folder / name).read_bytes())
    assert load_corpus(tmp_path).fingerprint == first.fingerprint
    (tmp_path / "aaa.py").write_text("one more = True\n")
    more = load_corpus(tmp_path)
    assert set(more.train_files) - {"aaa.py"} == set(first.train_files)
    assert set(more.held_out_files) - {"aaa.py"} == set(first.held_out_files)
    assert more.fingerprint != first.fingerprint


def test_the_standard_library_is_enough_text():
    corpus = load_corpus(stdlib_folder())
    assert len(corpus.train) > 3_000_000
    assert 0.03 < len(corpus.held_out) / len(corpus.train) < 0.3


def test_a_folder_without_text_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"corpus: got 0 training and 0 held-out files in .*, expected at least one"):
        load_corpus(tmp_path)


def test_a_batch_is_a_function_of_seed_and_step():
    text = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    batch = training_batch(text, 7, 4, 32, 0)
    assert batch.shape == (4, 33) and batch.dtype == np.uint8
    np.testing.assert_array_equal(batch, training_batch(text, 7, 4, 32, 0))
    assert not np.array_equal(batch, training_batch(text, 8, 4, 32, 0))
    assert not np.array_equal(batch, training_batch(text, 7, 4, 32, 1))
    assert all(row.tobytes() in text.tobytes() for row in batch)


def test_batches_reach_the_first_and_the_last_byte():
    text = np.arange(12, dtype=np.uint8)
    batches = np.concatenate([training_batch(text, step, 8, 4, 0) for step in range(20)])
    assert batches.min() == 0 and batches.max() == 11


@pytest.mark.parametrize("length, seq, limit", [(1000, 16, 10), (1000, 16, 10_000), (18, 16, 5), (999, 7, 3)])
def test_held_out_windows_predict_each_byte_at_most_once(length, seq, limit):
    text = np.random.default_rng(0).integers(0, 256, length).astype(np.uint8)
    starts = held_out_starts(text, seq, limit)
    assert len(starts) == min(limit, (length - 2) // seq)
    predicted = (starts[:, None] + np.arange(1, seq + 1)).ravel()
    assert len(set(predicted)) == len(predicted)
    assert predicted.min() >= 2 and predicted.max() < length
    np.testing.assert_array_equal(windows(text, starts, seq)[:, 1:].ravel(), text[predicted])
