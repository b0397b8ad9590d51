"""Descriptions of images and signals for networks that train on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from paper.descriptors import CELLS, ORIENTATIONS, describe_signals, held_out, oriented_gradients, segments, summaries


def test_a_ramp_has_one_orientation() -> None:
    """An image that grows to the right has gradients of angle 0 only; brightness and scale do not matter."""
    across = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None], (1, 64, 64, 3))
    found = oriented_gradients(across).reshape(CELLS, CELLS, ORIENTATIONS)
    assert (found[..., 0] > 0).all()
    assert not found[..., 1:].any()
    np.testing.assert_allclose(oriented_gradients(2 * across), oriented_gradients(across), rtol=1e-6)
    np.testing.assert_allclose((oriented_gradients(across) ** 2).sum(axis=1), 1, rtol=1e-5)


def test_segments_are_found_by_their_overlap() -> None:
    """Windows that overlap by half belong to one segment."""
    rng = np.random.default_rng(0)
    series = [rng.standard_normal((9, 64 * n)) for n in (4, 3)]
    windows = np.stack([s[:, k : k + 128] for s in series for k in range(0, s.shape[1] - 64, 64)])
    assert segments(windows).tolist() == [0, 0, 0, 1, 1]
    assert summaries(windows).shape == (5, 9 * 10)


def test_whole_segments_are_held_out(tmp_path: Path) -> None:
    """Training and test windows come from different segments, no two windows overlap, and partitions differ."""
    rng = np.random.default_rng(0)
    source = tmp_path / "har"
    source.mkdir()
    segment = [rng.standard_normal((9, 64 * 5)) for _ in range(8)]
    x = np.stack([s[:, k : k + 128] for s in segment for k in range(0, 256, 64)]).astype(np.float32)
    y = np.repeat(np.arange(2).repeat(4), 4)
    np.savez(source / "a.npz", x_train=x[:16], y_train=y[:16], x_test=x[16:], y_test=y[16:])
    describe_signals(source, tmp_path / "described")
    found = {seed: np.load(tmp_path / f"described-{seed}" / "a.npz") for seed in (1, 2, 3, 101)}
    assert all(len(f["x_train"]) == 12 and len(f["x_test"]) == 4 for f in found.values())
    assert not np.array_equal(found[1]["x_test"], found[2]["x_test"]) or not np.array_equal(
        found[1]["x_test"], found[3]["x_test"]
    )
    test = held_out(y, segments(x), 1)
    assert test.reshape(8, 4).all(axis=1).sum() == 2
    assert test.reshape(8, 4).any(axis=1).sum() == 2
