"""encoders.py: running statistics against numpy, masks, pixels, random shifts, BabyAI."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from encoders import (
    FeedForwardEncoder,
    GridLanguageEncoder,
    PixelEncoder,
    ResidualBlock,
    RunningNorm,
    random_shift,
)


def batches(count=6, B=4, T=5, O=3):
    "Batches of vectors far from 0. The first is masked completely, the others in part."
    generator = torch.Generator().manual_seed(0)
    out = []
    for i in range(count):
        x = 100 + torch.randn(B, T, O, generator=generator) * torch.tensor([0.5, 5.0, 50.0]) + 3 * i
        out.append((x, torch.rand(B, T, generator=generator) < (0.6 if i else 0.0)))
    return out


def statistics(norm):
    return norm.count, norm.mean_O, norm.variance_O, norm.size_O


def trained(data):
    norm = RunningNorm(3)
    for x, mask in data:
        norm.update(x, mask)
    return norm


def test_statistics_are_those_of_all_unmasked_data():
    data = batches()
    norm = trained(data)
    seen = np.concatenate([x[mask].double().numpy() for x, mask in data])
    assert norm.count.item() == len(seen) > 20
    np.testing.assert_allclose(norm.mean_O.numpy(), seen.mean(0), rtol=1e-10)
    np.testing.assert_allclose(norm.variance_O.numpy(), seen.var(0), rtol=1e-10)
    x = data[-1][0]
    expected = (x.numpy() - seen.mean(0)) / seen.std(0)
    np.testing.assert_allclose(norm(x).numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e6])
def test_masked_entries_cannot_leak(garbage):
    data = batches()
    dirty = [(torch.where(mask.unsqueeze(-1), x, garbage), mask) for x, mask in data]
    for clean, other in zip(statistics(trained(data)), statistics(trained(dirty))):
        assert torch.equal(clean, other)


def test_a_batch_without_a_real_vector_changes_nothing():
    norm = trained(batches())
    before = [x.clone() for x in statistics(norm)]
    norm.update(torch.full((4, 5, 3), float("nan")), torch.zeros(4, 5, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(before, statistics(norm)))


def one_pass(norm, x, mask):
    "The statistics after an update, computed with boolean indexing: (count, mean, variance, mean absolute value)."
    rows = x[mask].double()
    count = norm.count + len(rows)
    share = len(rows) / count.clamp(max=norm.memory).clamp(min=len(rows))
    delta = rows.mean(0) - norm.mean_O
    spread = (1 - share) * norm.variance_O + share * rows.var(0, correction=0)
    size = (1 - share) * norm.size_O + share * rows.abs().mean(0)
    return count, norm.mean_O + share * delta, spread + share * (1 - share) * delta**2, size


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e7])
def test_an_update_equals_boolean_indexing(offset):
    "Also for a large mean, where E[x^2] - E[x]^2 would lose the variance."
    norm = RunningNorm(3, memory=30)
    for x, mask in batches()[1:]:
        x = x.double() + offset
        expected = one_pass(norm, x, mask)
        norm.update(x, mask)
        for got, value in zip(statistics(norm), expected):
            np.testing.assert_allclose(got.numpy(), value.numpy(), rtol=1e-12 if offset < 1e7 else 1e-9)


def test_processes_pool_their_statistics_also_where_one_has_no_real_vector():
    "Two processes: the second has no real vector. Both end with the statistics of the first one's data."
    x, mask = batches()[-1]
    sums, ends = [], []
    for one_mask in (mask, torch.zeros_like(mask)):
        RunningNorm(3).update(x, one_mask, lambda s: sums.append(s) or s)
    for one_mask in (mask, torch.zeros_like(mask)):
        norm = RunningNorm(3)
        norm.update(x, one_mask, lambda s: (sums[0] + sums[1]) / 2)
        ends.append(norm)
    seen = x[mask].double().numpy()
    for norm in ends:
        assert norm.count.item() == len(seen) / 2
        np.testing.assert_allclose(norm.mean_O.numpy(), seen.mean(0), rtol=1e-12)
        np.testing.assert_allclose(norm.variance_O.numpy(), seen.var(0), rtol=1e-8)
        np.testing.assert_allclose(norm.size_O.numpy(), np.abs(seen).mean(0), rtol=1e-12)


def test_an_update_runs_on_the_meta_device():
    "A branch on a tensor's values, or a shape that depends on them, would raise there and make a GPU wait."
    encoder, x = FeedForwardEncoder(3, 16, 8).to("meta"), torch.empty(4, 5, 3, device="meta")
    encoder.update_statistics(x, torch.empty(4, 5, dtype=torch.bool, device="meta"))
    encoder.update_statistics(x, torch.empty(4, 5, dtype=torch.bool, device="meta"), lambda sums: sums)
    assert encoder(x).shape == (4, 5, 8)


def test_one_vector_is_enough_to_be_finite():
    norm = RunningNorm(2)
    norm.update(torch.tensor([[3.0, -1.0]]), torch.tensor([True]))
    assert norm(torch.tensor([3.0, -1.0])).tolist() == [0.0, 0.0]


def test_before_the_first_update_vectors_pass_as_they_are():
    x = torch.tensor([1.5, -9.0, 0.0])
    assert torch.equal(RunningNorm(3)(x), x)


def test_only_update_moves_the_statistics():
    norm = trained(batches()).train()
    before = [x.clone() for x in statistics(norm)]
    norm(torch.randn(7, 3))
    assert all(torch.equal(a, b) for a, b in zip(before, statistics(norm)))


@pytest.mark.parametrize("value", [0.0, 1 / 3, -100.0])
def test_a_feature_that_never_moved_is_zero_and_its_first_change_is_bounded(value):
    "Padding, and constants, also where pooled sums leave a deviation of rounding."
    norm, all_99 = RunningNorm(1, limit=10.0), torch.ones(99, dtype=torch.bool)
    for _ in range(5):
        norm.update(torch.full((99, 1), value), all_99, lambda sums: sums / 3)
    assert norm(torch.tensor([[value], [value + 1], [value - 1]])).tolist() == [[0.0]] * 3
    norm.update(torch.tensor([[value + 1.0]]), torch.tensor([True]), lambda sums: sums / 3)
    # One vector in 496 differs: (1 - p) / sqrt(p (1 - p)) is 22.2, clipped; the others are at -sqrt(p / (1 - p)).
    expected = torch.tensor([[10.0], [-(495**-0.5)]])
    torch.testing.assert_close(norm(torch.tensor([[value + 1], [value]])), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("unit", [1e-12, 1e-3, 1.0, 1e9])
@pytest.mark.parametrize("base", [0.0, 1.0, 1e5])
def test_the_unit_of_a_feature_changes_nothing(unit, base):
    "0 or 1 becomes -1 or 1 in every unit, also on a base that is 100,000 times the difference."
    norm, x = RunningNorm(1), ((torch.tensor([[0.0], [1.0]]) + base) * unit)
    norm.update(x, torch.tensor([True, True]))
    # On the base, float32 itself is only so exact: 2^-24 of 1e5 is 0.006.
    torch.testing.assert_close(
        norm(x), torch.tensor([[-1.0], [1.0]]), rtol=0, atol=0.05 if base > 1 else 1e-4
    )


def test_past_its_memory_it_forgets():
    "The data jump from 0 to 1: the mean of all data would stay below a half; the running mean reaches 1."
    all_10, memory = torch.ones(10, dtype=torch.bool), RunningNorm(1, memory=20)
    for value in [0.0] * 50 + [1.0] * 30:
        memory.update(torch.full((10, 1), value), all_10)
    # Each update has 10 / 20 of the weight, so 30 updates leave 2^-30 of the old mean.
    assert memory.mean_O.item() == pytest.approx(1 - 2.0**-30, abs=1e-12)
    assert memory.variance_O.item() == pytest.approx(2.0**-30, rel=1e-3)


def test_statistics_survive_save_and_load(tmp_path):
    norm = trained(batches())
    torch.save(norm.state_dict(), tmp_path / "norm.pt")
    other = RunningNorm(3)
    other.load_state_dict(torch.load(tmp_path / "norm.pt", weights_only=True))
    more, mask = batches()[-1]
    norm.update(more, mask)
    other.update(more, mask)
    assert all(torch.equal(a, b) for a, b in zip(statistics(norm), statistics(other)))


def test_statistics_keep_their_precision_under_autocast_and_large_counts():
    norm = RunningNorm(3, memory=1e12)
    norm.count.fill_(1e9)  # in float32, 1e9 + 1 = 1e9
    with torch.autocast("cpu", torch.bfloat16):
        norm.update(torch.ones(1, 3), torch.tensor([True]))
        assert norm(torch.ones(3)).dtype == torch.float32
    assert norm.count.item() == 1e9 + 1
    np.testing.assert_allclose(norm.mean_O.numpy(), 1 / (1e9 + 1), rtol=1e-9)


def test_a_mask_that_does_not_fit_is_named():
    norm, x = RunningNorm(3), torch.ones(2, 5, 3)
    for bad_x, mask in (
        (x, torch.ones(2, 5)),  # not boolean
        (x, torch.ones(2, dtype=torch.bool)),  # not a mask of every vector
        (x[..., :1], torch.ones(2, 5, dtype=torch.bool)),  # would be broadcast over the features
    ):
        with pytest.raises(ValueError, match=r"expected vectors \(\.\.\., 3\) and a boolean mask"):
            norm.update(bad_x, mask)
    assert norm.count.item() == 0


def test_encoder_shapes_and_normalised_output():
    torch.manual_seed(0)
    encoder = FeedForwardEncoder(input_dim=3, hidden=16, output_dim=8)
    x = torch.randn(2, 5, 3)
    e = encoder(x)
    assert e.shape == (2, 5, 8) and encoder(x[0, 0]).shape == (8,)
    torch.testing.assert_close(e.mean(-1), torch.zeros(2, 5), rtol=0, atol=1e-6)
    torch.testing.assert_close(encoder(x[1, 3]), e[1, 3])  # each step on its own


def test_encoder_normalises_its_input():
    "After normalisation the unit of the input makes no difference."
    torch.manual_seed(0)
    x, mask = torch.randn(50, 3), torch.ones(50, dtype=torch.bool)
    encoder = FeedForwardEncoder(3, 16, 8)
    encoder.norm.update(x, mask)
    plain = encoder(x)
    encoder.norm = RunningNorm(3)
    encoder.norm.update(1000 * x - 7, mask)
    torch.testing.assert_close(encoder(1000 * x - 7), plain, rtol=1e-3, atol=1e-3)


def test_update_statistics_is_the_norms_update():
    encoder, (x, mask) = FeedForwardEncoder(3, 16, 8), batches()[-1]
    encoder.update_statistics(x, mask)
    assert torch.equal(encoder.norm.mean_O, trained([(x, mask)]).mean_O)


# ------------------------------------------------------------------------------------------- pixels


def frames(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def pixel_encoder(architecture="impala", size=16, **settings):
    torch.manual_seed(0)
    return PixelEncoder(5, (size, size, 3), 12, architecture, **settings)


def inputs_of(module):
    "A list to which each call of the module adds its input."
    seen = []
    module.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    return seen


# IMPALA halves three times and rounds up: 64 -> 8, 84 -> 42 -> 21 -> 11.
# Nature: 64 -> 15 -> 6 -> 4, 84 -> 20 -> 9 -> 7.
@pytest.mark.parametrize(
    "architecture, depths, size, flat",
    [
        ("impala", (16, 32, 32), 64, 8 * 8 * 32),
        ("impala", (20, 36, 64), 64, 8 * 8 * 64),
        ("impala", (16, 32, 32), 84, 11 * 11 * 32),
        ("impala", (20, 36, 64), 84, 11 * 11 * 64),
        ("nature", (16, 32, 32), 64, 4 * 4 * 64),
        ("nature", (16, 32, 32), 84, 7 * 7 * 64),
    ],
)
def test_pixel_shapes(architecture, depths, size, flat):
    encoder = pixel_encoder(architecture, size, depths=depths)
    assert encoder.project.in_features == flat
    assert encoder(torch.randn(2, 3, 5), frames(2, 3, size, size, 3)).shape == (2, 3, 12)
    assert encoder(torch.randn(5), frames(size, size, 3)).shape == (12,)


@pytest.mark.parametrize("depths, count", [((16, 32, 32), 97_920), ((20, 36, 64), 237_348)])
def test_impala_parameters_counted_by_hand(depths, count):
    """A block's first convolution has 9 * inputs * D + D; each residual block two of 9 D^2 + D and a norm
    of 2 D, together 18 D^2 + 4 D. For 16, 32, 32: (448 + 2 * 4,672) + (4,640 + 2 * 18,560) +
    (9,248 + 2 * 18,560); for 20, 36, 64: (560 + 2 * 7,280) + (6,516 + 2 * 23,472) + (20,800 + 2 * 73,984)."""
    encoder = pixel_encoder(depths=depths)
    assert sum(p.numel() for p in encoder.cnn.parameters()) == count


def test_nature_parameters_counted_by_hand():
    "3 -> 32 by 8x8, 32 -> 64 by 4x4, 64 -> 64 by 3x3, each with its biases."
    assert sum(p.numel() for p in pixel_encoder("nature", 36).cnn.parameters()) == 6_176 + 32_832 + 36_928


def test_group_norm_follows_every_residual_sum_and_no_batch_norm_anywhere():
    kinds = [type(module).__name__ for module in pixel_encoder().cnn.modules()]
    assert kinds.count("GroupNorm") == 6 and not any("BatchNorm" in kind for kind in kinds)


def test_a_residual_block_by_hand():
    "Leaky ReLU, convolution, twice; the sum in four groups of two channels with mean 0 and variance 1."
    torch.manual_seed(0)
    block, x = ResidualBlock(8), torch.randn(2, 8, 5, 5)
    y = x
    for conv in block.convs:
        y = F.conv2d(torch.where(y > 0, y, 0.01 * y), conv.weight, conv.bias, padding=1)
    groups = (x + y).view(2, 4, -1)
    deviation = (groups.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = ((groups - groups.mean(-1, True)) / deviation).view(x.shape)
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("architecture, size", [("impala", 16), ("nature", 36)])
def test_image_features_leave_the_cnn_through_a_leaky_relu(architecture, size):
    encoder = pixel_encoder(architecture, size)
    seen = inputs_of(encoder.project)
    encoder(torch.zeros(2, 5), frames(2, size, size, 3))
    below, above = -seen[0].min().item(), seen[0].max().item()
    assert 0 < below < above / 20  # a slope of 0.01, not of 0 or 1


@pytest.mark.parametrize("architecture, size", [("impala", 16), ("nature", 36)])
def test_a_frame_alone_is_encoded_as_in_a_batch(architecture, size):
    encoder, vector, image = (
        pixel_encoder(architecture, size),
        torch.randn(2, 3, 5),
        frames(2, 3, size, size, 3),
    )
    image[0, 1] = 255
    alone = torch.stack([encoder(v, i) for v, i in zip(vector.view(6, 5), image.view(6, size, size, 3))])
    torch.testing.assert_close(encoder(vector, image).view(6, 12), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture, size", [("impala", 16), ("nature", 36)])
def test_image_features_are_normalised_before_the_symlogged_vector_joins(architecture, size):
    encoder, image = pixel_encoder(architecture, size), frames(2, 3, size, size, 3)
    vector = torch.tensor([0.0, 1.0, -1.0, 1000.0, -1e6]).expand(2, 3, 5)
    seen = inputs_of(encoder.merge)
    encoder(vector, image)
    features, joined = seen[0].split([256, 5], dim=-1)
    features = torch.where(features > 0, features, 100 * features)  # before their leaky ReLU
    torch.testing.assert_close(features.mean(-1), torch.zeros(2, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(features.var(-1, correction=0), torch.ones(2, 3), rtol=1e-2, atol=0)
    expected = torch.tensor([0.0, np.log(2), -np.log(2), np.log(1001), -np.log(1e6 + 1)])
    torch.testing.assert_close(joined, expected.float().expand(2, 3, 5))


def test_pixels_are_read_channels_last_and_scaled_to_half_a_unit_around_0():
    encoder, image = pixel_encoder(), frames(2, 16, 16, 3)
    image[0, :2, 0] = torch.tensor([[0], [255]])
    seen = inputs_of(encoder.cnn)
    encoder(torch.zeros(2, 5), image)
    np.testing.assert_allclose(seen[0], image.numpy().transpose(0, 3, 1, 2) / 255 - 0.5, atol=1e-6)
    assert seen[0].min() == -0.5 and seen[0].max() == 0.5


def test_passes_of_a_few_frames_change_neither_values_nor_gradients():
    "Seven frames, three at a time: the last pass is shorter."
    vector, image, results = torch.randn(7, 5), frames(7, 16, 16, 3), []
    for per_pass in (None, 3):
        encoder = pixel_encoder(frames_per_pass=per_pass)
        passes = inputs_of(encoder.cnn)
        out = encoder(vector, image)
        out.square().mul(torch.arange(12.0)).mean().backward()
        results.append([out.detach(), *(p.grad for p in encoder.parameters())])
        # Each pass runs twice: in the forward pass, and again in the backward pass.
        assert sorted(len(x) for x in passes) == ([7] if per_pass is None else [1, 1, 3, 3, 3, 3])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture, size", [("impala", 16), ("nature", 36)])
def test_pixel_gradients_reach_every_parameter(architecture, size):
    encoder = pixel_encoder(architecture, size)
    encoder(torch.randn(4, 5), frames(4, size, size, 3)).mul(torch.randn(4, 12)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())


def test_pixel_encoder_has_no_statistics_to_update():
    encoder = pixel_encoder()
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    encoder.update_statistics(torch.full((2, 3, 5), float("nan")), torch.ones(2, 3, dtype=torch.bool))
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())


@pytest.mark.parametrize(
    "image",
    [
        torch.rand(2, 3, 16, 16, 3),  # floats in [0, 1] would be nearly black
        frames(2, 3, 3, 16, 16),  # channels first
        frames(2, 3, 20, 16, 3),
        frames(3, 2, 16, 16, 3),  # as many frames as vectors, but not side by side
    ],
)
def test_an_image_that_does_not_fit_is_named(image):
    with pytest.raises(
        ValueError, match=r"^expected uint8 images \(2, 3, 16, 16, 3\) .* got .* channels last$"
    ):
        pixel_encoder()(torch.zeros(2, 3, 5), image)


def test_unknown_architectures_and_depths_are_named():
    with pytest.raises(ValueError, match="^unknown architecture 'resnet': use 'impala' or 'nature'$"):
        pixel_encoder("resnet")
    with pytest.raises(ValueError, match=r"^depths must be multiples of 4, .* got \(16, 30\)$"):
        pixel_encoder(depths=(16, 30))


# ------------------------------------------------------------------------------------- random shift


def shift_of(frame, shifted, pad):
    "The shift of a frame, found by trying every crop of the padded frame (None: no crop fits)."
    padded = np.pad(frame.numpy(), ((pad, pad), (pad, pad), (0, 0)), mode="edge")
    height, width, _ = frame.shape
    for y in range(2 * pad + 1):
        for x in range(2 * pad + 1):
            if np.array_equal(padded[y : y + height, x : x + width], shifted.numpy()):
                return y - pad, x - pad
    return None


def test_random_shift_is_a_crop_of_the_padded_frame_drawn_for_each_frame():
    image = frames(40, 8, 12, 10, 3)
    before = image.clone()
    shifted = random_shift(image, generator=torch.Generator().manual_seed(0))
    assert shifted.dtype == torch.uint8 and shifted.shape == image.shape and torch.equal(image, before)
    shifts = [[shift_of(*pair, 4) for pair in zip(a, b)] for a, b in zip(image, shifted)]
    assert all(shift is not None for sequence in shifts for shift in sequence)
    moved = [sequence for sequence in shifts if any(shift != (0, 0) for shift in sequence)]
    # Eight draws of 81 shifts give about 7.7 different ones; one draw for a whole sequence would give one.
    assert all(len(set(sequence)) >= 4 for sequence in moved)
    # The two axes are drawn separately: equal in a ninth of the frames, not in all.
    assert sum(down == right for sequence in moved for down, right in sequence) < len(moved) * 8 / 4
    for axis in (0, 1):
        counts = np.bincount([shift[axis] + 4 for sequence in moved for shift in sequence], minlength=9)
        # Each of -4..4 has a ninth of the frames, about 27 of 240.
        assert len(counts) == 9 and counts.min() >= 10 and counts.max() <= 55


def test_a_quarter_of_the_sequences_stays_untouched():
    image = frames(4000, 3, 6, 6, 3)
    shifted = random_shift(image, generator=torch.Generator().manual_seed(0))
    untouched = (shifted == image).flatten(1).all(1).float().mean().item()
    assert untouched == pytest.approx(0.25, abs=0.03)  # the standard error is 0.007


def test_random_shift_off_is_the_identity():
    image = frames(8, 3, 6, 6, 3)
    assert torch.equal(random_shift(image, share=0.0), image)
    assert torch.equal(random_shift(image, pad=0, share=1.0), image)


def test_random_shift_repeats_itself_with_its_generator():
    image = frames(8, 3, 6, 6, 3)
    a, b, c = (random_shift(image, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


# ------------------------------------------------------------------------------------------- BabyAI

LAYOUT = {"grid": slice(2, 149), "tokens": slice(149, 155)}  # two numbers before, three after


def babyai_encoder(tokens=LAYOUT["tokens"], size=None):
    torch.manual_seed(0)
    return GridLanguageEncoder(size or tokens.stop + 3, LAYOUT["grid"], tokens, vocabulary=30, output_dim=12)


def babyai_input(*instructions, length=6, seed=0):
    "One vector for each instruction, (N, 2 + 147 + length + 3), with the same grid and the same rest."
    generator = torch.Generator().manual_seed(seed)
    grid = torch.stack([torch.randint(0, n, (49,), generator=generator) for n in (11, 6, 4)], -1).flatten()
    rest = torch.randn(5, generator=generator)
    rows = []
    for instruction in instructions:
        tokens = torch.tensor([*instruction, *[0] * (length - len(instruction))])
        rows.append(torch.cat([rest[:2], grid.float(), tokens.float(), rest[2:]]))
    return torch.stack(rows)


def test_babyai_shapes():
    encoder, x = babyai_encoder(), babyai_input([5, 6], [7], [5, 6])
    e = encoder(x.expand(4, 3, 158))
    assert e.shape == (4, 3, 12) and encoder(x[0]).shape == (12,)
    torch.testing.assert_close(encoder(x[1]), e[2, 1])


def test_padding_of_an_instruction_changes_nothing():
    "The embedding is the same whether there is room for six tokens or for nine."
    short, long = babyai_encoder(), babyai_encoder(slice(149, 158))
    long.load_state_dict(short.state_dict())
    instructions = [5, 6, 7], [8], [2, 3, 4, 5, 6, 7]
    e_short, e_long = short(babyai_input(*instructions)), long(babyai_input(*instructions, length=9))
    torch.testing.assert_close(e_short, e_long)


def test_order_and_identity_of_tokens_matter_and_unknown_ones_are_unknown():
    encoder = babyai_encoder()
    e = encoder(babyai_input([5, 6], [6, 5], [5, 7], [5], [5, 1], [5, 99]))
    distance = torch.cdist(e, e)
    assert distance[:5, :5][~torch.eye(5, dtype=torch.bool)].min() > 1e-2
    assert torch.equal(e[4], e[5])


def test_an_instruction_of_padding_alone_is_finite_also_in_its_gradient():
    encoder = babyai_encoder()
    out = encoder(babyai_input([], []))
    out.mul(torch.arange(12.0)).sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)


def test_equal_instructions_are_read_once_and_the_slow_loop_agrees():
    "Instructions repeat, next to each other and later; each row has the features that it has alone."
    encoder = babyai_encoder()
    read = inputs_of(encoder.token_rnn)
    tokens = babyai_input([5, 6], [5, 6], [7], [5, 6], [], [])[:, LAYOUT["tokens"]]
    state = encoder.language_features(tokens)
    assert [len(x) for x in read] == [4]
    for row, got in zip(tokens.long().tolist(), state):
        words = torch.tensor([[word for word in row if word]], dtype=torch.long)
        last = (
            encoder.token_rnn(encoder.token_embedding(words))[1][0, 0] if words.numel() else torch.zeros(128)
        )
        torch.testing.assert_close(got, last)


def test_position_and_every_code_of_the_grid_matter():
    encoder, x = babyai_encoder(), babyai_input([5, 6])[0]
    x[LAYOUT["grid"]] = torch.tensor([1.0, 0.0, 0.0]).repeat(49)  # empty cells
    seen = [encoder(x)]
    for cell in (0, 6, 24, 45, 48):  # corners, the middle, the agent's own cell
        for change in ([5.0, 2.0, 0.0], [5.0, 3.0, 0.0], [4.0, 2.0, 0.0], [4.0, 2.0, 2.0]):
            y = x.clone()
            y[2 + 3 * cell : 5 + 3 * cell] = torch.tensor(change)
            seen.append(encoder(y))
    e = torch.stack(seen)
    assert torch.pdist(e).min() > 1e-3


def test_a_cell_is_the_sum_of_its_three_codes():
    "Code c of channel k has row c + (0, 11, 17)[k] of the table."
    encoder, x = babyai_encoder(), babyai_input([5])
    seen = inputs_of(encoder.grid_cnn)
    encoder(x)
    cells = x[0, LAYOUT["grid"]].long().view(7, 7, 3)
    table = encoder.cell_embedding.weight
    for row, column in ((0, 0), (2, 5), (6, 3)):
        thing, colour, state = cells[row, column].tolist()
        expected = table[thing] + table[11 + colour] + table[17 + state]
        torch.testing.assert_close(seen[0][0, :, row, column], expected)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e6, -3.0])
def test_garbage_in_a_padded_step_raises_nothing_and_stays_there(garbage):
    encoder, x = babyai_encoder(), babyai_input([5], [6], [7])
    clean = encoder(x)
    x[1] = garbage
    torch.testing.assert_close(encoder(x)[[0, 2]], clean[[0, 2]])


def test_only_the_rest_is_normalised():
    encoder = babyai_encoder()
    x = torch.randn(50, 158) * 10
    mask = torch.rand(50) < 0.5
    encoder.update_statistics(x, mask)
    rest = torch.cat([x[:, :2], x[:, 155:]], -1)
    torch.testing.assert_close(encoder.norm.mean_O.float(), rest[mask].mean(0))
    seen = inputs_of(encoder.rest_layer)
    encoder(x)
    torch.testing.assert_close(seen[0], encoder.norm(rest))


def test_babyai_gradients_reach_every_parameter():
    encoder = babyai_encoder()
    encoder(babyai_input([5, 6], [7])).mul(torch.randn(2, 12)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
    assert not encoder.token_embedding.weight[0].any() and not encoder.token_embedding.weight.grad[0].any()


@pytest.mark.parametrize(
    "grid, tokens",
    [
        (slice(0, 146), slice(147, 150)),  # a code is missing
        (slice(0, 147), slice(146, 150)),  # they overlap
        (slice(0, 147), slice(150, 150)),  # no token
        (slice(20, 167), slice(0, 10)),  # past the end
    ],
)
def test_slices_that_do_not_fit_are_named(grid, tokens):
    with pytest.raises(
        ValueError, match=r"^expected a slice of 147 grid codes .* within 160 numbers, got slice"
    ):
        GridLanguageEncoder(160, grid, tokens, 30, 8)


def test_a_babyai_vector_of_another_size_is_named():
    with pytest.raises(ValueError, match=r"^expected vectors \(..., 158\), got \(2, 79\)$"):
        babyai_encoder()(torch.zeros(2, 79))


def test_all_encoders_run_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        pixels = pixel_encoder(frames_per_pass=1)(torch.randn(2, 5), frames(2, 16, 16, 3))
        babyai = babyai_encoder()(babyai_input([5, 6], []))
    assert pixels.isfinite().all() and babyai.isfinite().all()
