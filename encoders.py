r"""Timestep encoders: the observation at one step -> one vector for the Transformer.

What     running input normalisation; encoders for vectors, for images with a vector (IMPALA, Nature) and for
         BabyAI's grid and instruction; random shifts of images
Why      observations mix one-hots, angles, pixels and rewards of any size; the Transformer needs inputs of
         one size
Paper    AMAGO-2 section 3 (o+_t), appendix A and Table 2, "Timestep Encoder": FF (512, 256) and
         FF (512, 200), IMPALA [16, 32, 32] and [20, 36, 64], "Multi-Modal CNN (Grid), RNN (Language), FF"
Shapes   O observation, V the vector that comes with an image, E embedding; any leading dimensions:
         (..., O) -> (..., E); images (..., H, W, C), uint8, C = 3. Inside, leading dimensions are flattened
         to N frames or vectors. R numbers of the rest, L tokens, U runs of equal instructions, G grid codes,
         D depth or H hidden width
Notes    The vector already contains the previous action, the previous reward and flags: the environment (or
         the caller) concatenates them.
         Only `update_statistics` changes the statistics. Training calls it once a batch; acting and
         evaluation never do. `random_shift`, too, is called in training alone, once a batch.
         DEVIATION, since the paper gives none: all widths after the CNNs and in the grid's encoder, and one
         linear layer to merge the parts.
Use      encoder.update_statistics(obs, mask_BT)   # in training, once a batch; mask: real steps, not padding
         e = encoder(obs)                          # (..., E); PixelEncoder takes (vector, image)
Copy     this file alone; needs torch
Try      python encoders.py
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class RunningNorm(nn.Module):
    """Normalise vectors (..., O) by running means and standard deviations.

    Arguments: `dim` O; `limit` clips the result; `floor` is the smallest standard deviation, as a share of the
    feature's mean absolute value. A feature that never changed becomes 0, and so does its first change.
    `memory` is the largest weight of the past, counted in vectors. Up to that many vectors the
    statistics are exactly those of all data seen; later they are an exponential average, since the data
    changes as the policy learns. Before the first update the mean is 0 and the standard deviation 1, so
    vectors within +-`limit` are unchanged. The statistics are float64 buffers, which are saved and loaded.
    DEVIATION: the paper does not specify the normalisation; the authors' scripts have a floor of 0.01, a limit
    of 1e4 and a longer memory. An absolute floor would hide a feature measured in small units.
    """

    def __init__(self, dim: int, limit: float = 10.0, floor: float = 1e-6, memory: float = 1e6):
        super().__init__()
        self.limit, self.floor, self.memory = limit, floor, memory
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean_O", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("variance_O", torch.ones(dim, dtype=torch.float64))
        self.register_buffer("size_O", torch.zeros(dim, dtype=torch.float64))  # mean absolute value

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor, pool: Callable | None = None) -> None:
        """Update the statistics with the vectors of x (..., O) where the booleans mask (...) are True.

        Other vectors have no effect, even NaN; a NaN where the mask is True would corrupt the statistics
        permanently. If the mask is False everywhere, nothing changes. With several processes, `pool` takes
        this one's sums (4, O) and returns their mean over all processes; `count` and `memory` are then per
        process. Raises ValueError if shapes do not fit or the mask is not boolean.
        """
        # A mask of 0s and 1s would be refused by `where` with a message that does not help.
        if mask.dtype != torch.bool or x.shape != (*mask.shape, len(self.mean_O)):
            raise ValueError(
                f"expected vectors (..., {len(self.mean_O)}) and a boolean mask (...), got vectors "
                f"{tuple(x.shape)} and a mask {tuple(mask.shape)} of {mask.dtype}: try mask=mask.bool()"
            )
        # Plain: x_NO = x[mask]. The number of its rows would depend on data, and a GPU would wait for it.
        # `where`, not a product with the mask: 0 * NaN is NaN. In float64: float32 cannot count past 2^24.
        mask_N1 = mask.reshape(-1, 1)
        x_NO = torch.where(mask_N1, x.reshape(mask.numel(), x.shape[-1]).double(), 0.0)
        number = mask.sum().double()
        # The variance needs a second pass over x: E[x^2] - mean^2 loses its digits where the mean is large.
        mean_O, size_O = x_NO.sum(0) / number.clamp(min=1), x_NO.abs().sum(0) / number.clamp(min=1)
        spread_O = torch.where(mask_N1, x_NO - mean_O, 0.0).square().sum(0) / number.clamp(min=1)
        if pool is not None:
            # E[x], E[|x|] and E[x^2] over all processes; var = E[x^2] - E[x]^2
            sums = torch.stack([torch.ones_like(mean_O), mean_O, size_O, spread_O + mean_O**2]) * number
            number_O, *sums_O = pool(sums)
            number = number_O[0]
            mean_O, size_O, square_O = (sum_O / number_O.clamp(min=1e-6) for sum_O in sums_O)
            spread_O = (square_O - mean_O**2).clamp(min=0)
        self.count += number
        # Parallel mean and variance (Chan et al. 1979), where share is the weight of the batch:
        #   mean' = mean + share * delta,  var' = (1 - share) var + share var_x + share (1 - share) delta^2
        # The first update has share 1: nothing is left of the initial mean 0 and variance 1. Without a vector
        # the share is 0, not the 0 / 0 of the very first update.
        share = number / torch.maximum(self.count.clamp(max=self.memory), number)
        share = torch.where(number > 0, share, 0.0)
        delta_O = mean_O - self.mean_O
        self.mean_O += share * delta_O
        self.size_O.lerp_(size_O, share)
        self.variance_O.lerp_(spread_O, share).add_(share * (1 - share) * delta_O**2)

    def forward(self, x: Tensor) -> Tensor:
        """(..., O) -> (..., O), float32, in [-limit, limit]."""
        own_O = self.variance_O.sqrt()
        deviation_O = torch.maximum(own_O, self.floor * self.size_O).float()
        # Less is rounding: of float32 (6e-8), or of pooled sums of squares (1e-8, even of a constant). Divided by
        # infinity, a feature that never changed is 0, and so is the first change of it.
        deviation_O = torch.where((own_O > 1e-7 * self.size_O) & (deviation_O > 0), deviation_O, torch.inf)
        return ((x.float() - self.mean_O.float()) / deviation_O).clamp(-self.limit, self.limit)


class FeedForwardEncoder(nn.Module):
    """Observations (..., O) -> embeddings (..., E): input normalisation, two hidden layers, LayerNorm.

    Arguments: `input_dim` O; `hidden`, the width of both hidden layers; `output_dim` E. In Table 2,
    FF (512, 200) has hidden 512 and output 200. `norm` holds the input statistics; training calls
    `update_statistics`.
    Source: paper, appendix A, with the layers of the authors' code.
    """

    def __init__(self, input_dim: int, hidden: int, output_dim: int):
        super().__init__()
        self.norm = RunningNorm(input_dim)
        widths = [input_dim, hidden, hidden, output_dim]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))
        # All embeddings enter the Transformer with the same size, whatever the size of the observation.
        self.out_norm = nn.LayerNorm(output_dim)

    def update_statistics(self, x: Tensor, mask: Tensor, *pool: Callable) -> None:
        """Update the input statistics with x (..., O) where mask (...) is True; see `RunningNorm.update`."""
        self.norm.update(x, mask, *pool)

    def forward(self, x: Tensor) -> Tensor:
        """(..., O) -> (..., E)."""
        x, (*hidden, last) = self.norm(x), self.layers  # unpacked: slicing a ModuleList makes a new module
        for layer in hidden:
            x = F.leaky_relu(layer(x))
        return self.out_norm(last(x))


# ------------------------------------------------------------------------------------------- pixels


class ResidualBlock(nn.Module):
    """norm(x + f(x)) on (N, D, H, W), where f applies twice: leaky ReLU, 3x3 convolution.

    Group norm computes its statistics within one frame. With batch norm, the features of a frame would
    depend on the rest of the batch. Source: IMPALA (Espeholt et al. 2018) with the paper's group norm
    (appendix A); its place and its four groups are those of the authors' code.
    """

    def __init__(self, depth: int, groups: int = 4):
        super().__init__()
        self.norm = nn.GroupNorm(groups, depth)
        self.convs = nn.ModuleList([nn.Conv2d(depth, depth, 3, padding=1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """(N, D, H, W) -> (N, D, H, W)."""
        y = x
        for conv in self.convs:
            y = conv(F.leaky_relu(y))
        return self.norm(x + y)


def impala_cnn(channels: int, depths: tuple[int, ...]) -> nn.Sequential:
    """IMPALA's residual CNN, (N, channels, H, W) -> (N, features); every block halves height and width.

    A block of depth D is a 3x3 convolution to D channels, a 3x3 max-pool of stride 2 and two residual blocks.
    Source: Espeholt et al. 2018, figure 3; depths from Table 2. Raises ValueError if a depth is not a
    multiple of group norm's 4 groups.
    """
    if any(depth % 4 for depth in depths):
        raise ValueError(f"depths must be multiples of 4, the groups of group norm; got {tuple(depths)}")
    layers = []
    for inputs, depth in zip((channels, *depths), depths):
        layers += [nn.Conv2d(inputs, depth, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        layers += [ResidualBlock(depth), ResidualBlock(depth)]
    return nn.Sequential(*layers, nn.LeakyReLU(), nn.Flatten())


def nature_cnn(channels: int) -> nn.Sequential:
    """The three convolutions of DQN (Mnih et al. 2015), (N, channels, H, W) -> (N, features).

    Leaky ReLU, as in all of the paper's networks (appendix A). Images must be at least 36x36.
    """
    layers = []
    for inputs, depth, kernel, stride in ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
        layers += [nn.Conv2d(inputs, depth, kernel, stride), nn.LeakyReLU()]
    return nn.Sequential(*layers, nn.Flatten())


class PixelEncoder(nn.Module):
    """A vector (..., V) and an image (..., H, W, 3) -> embeddings (..., E).

    Arguments: `vector_dim` V; `image_shape` (H, W, 3); `output_dim` E; `architecture` "impala" or
    "nature"; `depths` of IMPALA's blocks; `feature_dim`, the width of the image's features;
    `frames_per_pass`, the number of frames whose activations are in memory at a time (None: all). The
    backward pass computes them again, which costs one more forward pass and does not change the result.
    Without it, a frame of 64x64 needs about 2.5 MB in float32, and a batch of 32 x 256 frames 20 GB.
    Source: paper, appendix A. Raises ValueError for an unknown architecture.
    """

    def __init__(
        self,
        vector_dim: int,
        image_shape: tuple[int, int, int],
        output_dim: int,
        architecture: str = "impala",
        depths: tuple[int, ...] = (16, 32, 32),
        feature_dim: int = 256,
        frames_per_pass: int | None = None,
    ):
        super().__init__()
        if architecture not in ("impala", "nature"):
            raise ValueError(f"unknown architecture {architecture!r}: use 'impala' or 'nature'")
        self.image_shape, self.frames_per_pass = tuple(image_shape), frames_per_pass
        height, width, channels = self.image_shape
        self.cnn = impala_cnn(channels, depths) if architecture == "impala" else nature_cnn(channels)
        with torch.no_grad():
            flat = self.cnn(torch.zeros(1, channels, height, width)).numel()
        self.project = nn.Linear(flat, feature_dim)
        # Normalised before the vector is concatenated, so that image and vector have similar sizes.
        self.image_norm = nn.LayerNorm(feature_dim)
        self.merge = nn.Linear(feature_dim + vector_dim, output_dim)
        self.out_norm = nn.LayerNorm(output_dim)

    def update_statistics(self, vector: Tensor, mask: Tensor, *pool: Callable) -> None:
        """Do nothing: symlog compresses vectors (..., V), and pixels have a known range."""

    def features(self, image_NHWC: Tensor) -> Tensor:
        """Frames (N, H, W, 3), uint8 -> image features (N, F)."""
        # Converted here, so that only the frames of this pass exist as floats. The range is [-0.5, 0.5].
        x = image_NHWC.permute(0, 3, 1, 2).float() / 255 - 0.5
        return F.leaky_relu(self.image_norm(self.project(self.cnn(x))))

    def forward(self, vector: Tensor, image: Tensor) -> Tensor:
        """(..., V) float and (..., H, W, 3) uint8 -> (..., E). Raises ValueError for other images."""
        expected = (*vector.shape[:-1], *self.image_shape)
        # Floats in [0, 1] would be read as nearly black images.
        if image.dtype != torch.uint8 or image.shape != expected:
            raise ValueError(
                f"expected uint8 images {expected} for a vector {tuple(vector.shape)}, got {image.dtype} "
                f"{tuple(image.shape)}: give pixels 0 to 255, channels last"
            )
        image_NHWC = image.reshape(-1, *self.image_shape)
        if len(image_NHWC) <= (self.frames_per_pass or len(image_NHWC)) or not torch.is_grad_enabled():
            features = self.features(image_NHWC)
        else:
            # Plain: features = self.features(image_NHWC). Same values and gradients.
            passes = image_NHWC.split(self.frames_per_pass)
            features = torch.cat([checkpoint(self.features, x, use_reentrant=False) for x in passes])
        features = features.view(*vector.shape[:-1], -1)
        # symlog brings a reward of 1000 to the size of the other numbers; twohot.py explains it.
        vector = torch.sign(vector) * torch.log1p(torch.abs(vector))
        return self.out_norm(self.merge(torch.cat([features, vector], -1)))


@torch.no_grad()
def random_shift(
    image_BTHWC: Tensor, pad: int = 4, share: float = 0.75, generator: torch.Generator | None = None
) -> Tensor:
    """Shift images (B, T, H, W, C) at random by up to `pad` pixels in each direction; returns a new tensor.

    A sequence is shifted with probability `share`, and each of its frames by a shift of its own; the other
    sequences are unchanged. For training only. `generator` must be on the images' device.
    OFFICIAL: `share` and a separate shift for each frame are from the authors' scripts; the paper only names
    DrQ-v2. Source: DrQ-v2's pad and crop (Yarats et al. 2021; paper, appendix A), by whole pixels: uint8
    stays uint8.
    """
    B, T, H, W, C = image_BTHWC.shape
    device = image_BTHWC.device
    shift_2BT = torch.randint(-pad, pad + 1, (2, B, T), generator=generator, device=device)
    shift_2BT = shift_2BT * (torch.rand(B, 1, generator=generator, device=device) < share)
    down_N1, right_N1 = shift_2BT.reshape(2, B * T, 1)
    # Replication padding and cropping in one lookup: outside the image, the nearest pixel is used.
    row_NH = (torch.arange(H, device=device) + down_N1).clamp(0, H - 1)
    column_NW = (torch.arange(W, device=device) + right_N1).clamp(0, W - 1)
    first_N11 = torch.arange(B * T, device=device).view(-1, 1, 1) * (H * W)
    pixel_NHW = first_N11 + row_NH.unsqueeze(2) * W + column_NW.unsqueeze(1)
    return image_BTHWC.reshape(-1, C).index_select(0, pixel_NHW.flatten()).view(B, T, H, W, C)


# ------------------------------------------------------------------------------------------- BabyAI


class GridLanguageEncoder(nn.Module):
    """BabyAI's observations (..., O) -> embeddings (..., E): a CNN for the grid, an RNN for the language.

    Arguments: `input_dim` O; `grid`, the slice of the 7x7 cells with (object, colour, state) codes, row by
    row; `tokens`, the slice of the instruction: token numbers, then padding; `vocabulary`, the number of
    tokens, with 0 (padding) and 1 (unknown); `output_dim` E; `hidden`, the width of each part's features.
    All other numbers are the rest, which a linear layer encodes: direction, previous action, reward, flags.
    `norm` holds the statistics of the rest alone: codes and tokens are names, not quantities.
    Source: paper, Table 2. Raises ValueError for slices that do not fit.
    """

    view = 7
    codes = (11, 6, 4)  # objects, colours, states (3 of a door, 4 directions of an agent) | minigrid

    def __init__(
        self, input_dim: int, grid: slice, tokens: slice, vocabulary: int, output_dim: int, hidden: int = 128
    ):
        super().__init__()
        cells = self.view**2
        index = list(range(input_dim))
        grid_index, token_index = index[grid], index[tokens]
        rest = sorted(set(index) - set(grid_index) - set(token_index))
        if len(grid_index) != 3 * cells or not token_index or set(grid_index) & set(token_index):
            raise ValueError(
                f"expected a slice of {3 * cells} grid codes and a separate slice of tokens within "
                f"{input_dim} numbers, got {grid} and {tokens}: take them from the environment's layout"
            )
        self.input_dim, self.grid, self.tokens, self.vocabulary = input_dim, grid, tokens, vocabulary
        self.register_buffer("rest_R", torch.tensor(rest, dtype=torch.long), persistent=False)
        # One table for all codes: a code's row is the code plus the number of codes of the kinds before it.
        first_3 = torch.tensor(self.codes).cumsum(0) - torch.tensor(self.codes)
        self.register_buffer("first_3", first_3, persistent=False)
        self.register_buffer("last_3", torch.tensor(self.codes) - 1, persistent=False)
        self.cell_embedding = nn.Embedding(sum(self.codes), 32)
        # Padded, because the agent's own cell is at the edge of its view and matters as much as the others.
        layers = []
        for _ in range(2):
            layers += [nn.Conv2d(32, 32, 3, padding=1), nn.LeakyReLU()]
        self.grid_cnn = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * cells, hidden), nn.LeakyReLU())
        self.token_embedding = nn.Embedding(vocabulary, 32, padding_idx=0)
        self.token_rnn = nn.GRU(32, hidden, batch_first=True)
        self.norm = RunningNorm(len(rest))
        self.rest_layer = nn.Linear(len(rest), hidden)
        self.merge = nn.Linear(3 * hidden, output_dim)
        self.out_norm = nn.LayerNorm(output_dim)

    def update_statistics(self, x: Tensor, mask: Tensor, *pool: Callable) -> None:
        """Update the rest's statistics with x (..., O) where mask (...) is True; see `RunningNorm.update`."""
        self.norm.update(x[..., self.rest_R], mask, *pool)

    def grid_features(self, grid_NG: Tensor) -> Tensor:
        """Codes (N, 147) -> (N, hidden)."""
        # An invalid code is replaced by the nearest valid one: padding may contain anything.
        code_NHW3 = grid_NG.view(-1, self.view, self.view, 3).long()
        code_NHW3 = torch.minimum(code_NHW3.clamp(min=0), self.last_3)
        # A cell's embedding is the sum of the embeddings of its object, colour and state.
        cell_NHWE = self.cell_embedding(code_NHW3 + self.first_3).sum(-2)
        return self.grid_cnn(cell_NHWE.permute(0, 3, 1, 2))

    def language_features(self, token_NL: Tensor) -> Tensor:
        """Token numbers (N, L), 0 after the last -> the RNN's state at the last real token (N, hidden)."""
        token_NL = token_NL.long()
        token_NL = torch.where((token_NL < 0) | (token_NL >= self.vocabulary), 1, token_NL)  # unknown
        # Plain: run the RNN on all N rows, as on a GPU. An instruction is the same in a whole rollout, so each run of
        # equal rows is read once: on a CPU, 8 times faster for 16 windows of 32 steps, forward and backward.
        # The number of runs U depends on data: the host would have to wait until a GPU has counted them.
        token_UL, row_N = token_NL, torch.arange(len(token_NL), device=token_NL.device)
        if token_NL.device.type == "cpu":
            token_UL, row_N = torch.unique_consecutive(token_NL, dim=0, return_inverse=True)
        state_ULH, _ = self.token_rnn(self.token_embedding(token_UL))
        # The state at the last real token, not the last state, which depends on the amount of padding.
        length_U = (token_UL != 0).sum(-1)
        state_UH = state_ULH[torch.arange(len(token_UL), device=token_UL.device), (length_U - 1).clamp(min=0)]
        # Without tokens the features are zero.
        state_UH = state_UH * (length_U > 0).unsqueeze(-1)
        return state_UH.index_select(0, row_N)

    def forward(self, x: Tensor) -> Tensor:
        """(..., O) -> (..., E). Raises ValueError for vectors of another size."""
        if x.shape[-1] != self.input_dim:
            raise ValueError(f"expected vectors (..., {self.input_dim}), got {tuple(x.shape)}")
        x_NO = x.reshape(-1, self.input_dim)
        grid_NH = self.grid_features(x_NO[:, self.grid])
        language_NH = self.language_features(x_NO[:, self.tokens])
        rest_NH = F.leaky_relu(self.rest_layer(self.norm(x_NO[:, self.rest_R])))
        merged_NE = self.merge(torch.cat([grid_NH, language_NH, rest_NH], -1))
        return self.out_norm(merged_NE).view(*x.shape[:-1], -1)


if __name__ == "__main__":
    torch.manual_seed(0)
    norm = RunningNorm(3)
    x_BO = torch.tensor([[1.0, 10.0, 0.0], [3.0, 30.0, 0.0], [float("nan"), 99.0, 99.0]])
    norm.update(x_BO, mask=torch.tensor([True, True, False]))
    print("An update with (1, 10, 0), (3, 30, 0) and a masked vector:")
    print(f"  mean {norm.mean_O.tolist()}, standard deviation {norm.variance_O.sqrt().tolist()}")
    print(f"  the first vector becomes {norm(x_BO[0]).tolist()}")
    print("  by hand: (1 - 2) / 1 and (10 - 20) / 10; the constant feature is divided by infinity, not by 0")

    encoder = FeedForwardEncoder(input_dim=3, hidden=16, output_dim=8)
    print("Feed-forward encoder:", sum(p.numel() for p in encoder.parameters()), "parameters")
    print("  by hand: 3 x 16 + 16  +  16 x 16 + 16  +  16 x 8 + 8  +  2 x 8 = 488")
    pixels = PixelEncoder(vector_dim=4, image_shape=(64, 64, 3), output_dim=8)
    print("IMPALA encoder: a frame of 64 x 64 becomes", pixels.project.in_features, "features")
    print("  by hand: three blocks of stride 2 leave 8 x 8 x 32")

    row_BTHWC = torch.arange(6, dtype=torch.uint8).expand(1, 4, 1, 6)[..., None]
    print("The row 0 1 2 3 4 5 in four frames, each shifted by up to 2 pixels; the border is repeated:")
    print(" ", random_shift(row_BTHWC, pad=2, share=1.0).flatten(2)[0].tolist())
    babyai = GridLanguageEncoder(160, slice(0, 147), slice(147, 152), vocabulary=30, output_dim=8)
    print("BabyAI encoder, the language's features: the order of words matters, and padding does not")
    for tokens in ([5, 7], [7, 5], [5, 7, 0, 0, 0]):
        features = babyai.language_features(torch.tensor([tokens]))[0, :4].tolist()
        print(f"  tokens {tokens!s:<15} -> {[round(x, 3) for x in features]}, ...")
