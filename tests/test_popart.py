"""popart.py: the authors' numbers, unchanged predictions, masks, saving and loading."""

import pytest
import torch
from authors import golden

from popart import PopArt


def test_six_updates_equal_the_authors_numbers():
    data = golden("popart")
    popart = PopArt(2, float(data["beta"]), float(data["init_nu"]))
    for i in range(6):
        popart.update(data[f"val{i}"], data[f"mask{i}"].bool())
        for name in ("mu", "nu", "sigma", "w", "b"):
            torch.testing.assert_close(getattr(popart, name), data[f"{name}{i}"], rtol=1e-4, atol=2e-5)
        for name in ("normalised", "denormalised"):
            ours = getattr(popart, name)(data["raw"])
            torch.testing.assert_close(ours, data[f"{name}{i}"], rtol=1e-4, atol=2e-5)


def test_an_update_leaves_the_output_where_it_was():
    torch.manual_seed(0)
    popart, raw = PopArt(3, beta=0.01), torch.randn(50, 3)
    for scale in (1.0, 1000.0, 0.1):
        before = popart.denormalised(raw)
        popart.update(scale * torch.randn(40, 3) + scale)
        torch.testing.assert_close(popart.denormalised(raw), before, rtol=1e-3, atol=1e-3)
        assert (popart.normalised(raw) - before).abs().max() > 0.1  # the loss's own scale has changed


def test_targets_seen_for_long_become_zero_mean_and_unit_deviation():
    torch.manual_seed(0)
    popart = PopArt(1, beta=0.05)
    for _ in range(300):
        y = 50 + 20 * torch.randn(200, 1)
        popart.update(y)
    n = popart.standardise(y)
    assert abs(n.mean().item()) < 0.2 and n.std().item() == pytest.approx(1, abs=0.2)
    # A prediction and a target of the same return are the same number in the loss.
    raw = torch.randn(9, 1)
    torch.testing.assert_close(
        popart.standardise(popart.denormalised(raw)), popart.normalised(raw), rtol=1e-3, atol=1e-3
    )


def test_what_is_masked_does_not_leak():
    clean, dirty = PopArt(2), PopArt(2)
    value, mask = torch.randn(4, 5, 2), torch.rand(4, 5, 2) < 0.5
    clean.update(torch.where(mask, value, 0.0), mask)
    dirty.update(torch.where(mask, value, float("nan")), mask)
    assert all(
        torch.equal(clean.state_dict()[k], v) and v.isfinite().all() for k, v in dirty.state_dict().items()
    )


def test_a_discount_without_values_keeps_its_statistics():
    popart = PopArt(2)
    popart.update(torch.randn(30, 2) + 5)
    before = {k: v.clone() for k, v in popart.state_dict().items()}
    popart.update(torch.full((6, 2), 100.0), torch.zeros(6, 2, dtype=torch.bool))
    assert all(torch.equal(before[k], v) for k, v in popart.state_dict().items())
    popart.update(torch.full((6, 2), 100.0), torch.tensor([True, False]).expand(6, 2))
    assert popart.mu[0] != before["mu"][0] and popart.mu[1] == before["mu"][1] and popart.t.tolist() == [3, 2]


def test_statistics_are_buffers_and_survive_save_and_load(tmp_path):
    popart, other = PopArt(2), PopArt(2)
    popart.update(torch.randn(30, 2) * 50)
    assert not list(popart.parameters())
    torch.save(popart.state_dict(), tmp_path / "popart.pt")
    other.load_state_dict(torch.load(tmp_path / "popart.pt", weights_only=True))
    raw = torch.randn(7, 2)
    assert torch.equal(popart.denormalised(raw), other.denormalised(raw))


def test_an_update_runs_on_the_meta_device():
    "A branch on a tensor's values would raise there."
    popart = PopArt(2).to("meta")
    popart.update(torch.empty(4, 5, 2, device="meta"), torch.empty(4, 5, 2, dtype=torch.bool, device="meta"))
    assert popart.denormalised(torch.empty(3, 2, device="meta")).shape == (3, 2)


def test_equal_targets_do_not_divide_by_zero():
    popart = PopArt(1, beta=0.5)
    for _ in range(50):
        popart.update(torch.full((8, 1), 3.0))
    assert popart.sigma.item() >= 1e-4 and popart.standardise(torch.tensor([[3.0]])).isfinite().all()
