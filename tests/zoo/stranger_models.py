"""The models of ``strangers.py``: a small one of each library.

A builder imports its library, and returns a module and its positional arguments. The first dim of
each argument is the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BATCH, TIME = 5, 8  # uneven over two ranks
Built = tuple[nn.Module, tuple[torch.Tensor, ...]]
BUILDERS: dict[str, Callable[[], Built]] = {}


def stranger(library: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Decorator: this function builds the model of ``library``, a name on PyPI."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        BUILDERS[library] = build
        return build

    return register


def x(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape)


def ids(*shape: int, high: int = 30) -> torch.Tensor:
    return torch.randint(1, high, (BATCH, *shape))


class Calls(nn.Module):
    """Runs ``call(module, *args)``: for a module whose work is not its ``forward``."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: torch.Tensor) -> Any:
        return self.call(self.module, *args)


# Transformers and their parts


@stranger("x-transformers")
def x_transformers() -> Built:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
    return TransformerWrapper(num_tokens=30, max_seq_len=TIME, attn_layers=layers), (ids(TIME),)


@stranger("performer-pytorch")
def performer() -> Built:
    from performer_pytorch import Performer

    return Performer(dim=32, depth=1, heads=4, dim_head=8, causal=False), (x(TIME, 32),)


@stranger("perceiver-pytorch")
def perceiver() -> Built:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        num_freq_bands=2, max_freq=4.0, depth=1, input_axis=1, input_channels=3, num_latents=4,
        latent_dim=16, cross_dim_head=8, latent_heads=2, latent_dim_head=8, num_classes=5,
    )  # fmt: skip
    return model, (x(TIME, 3),)


@stranger("local-attention")
def local_attention() -> Built:
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=30, dim=32, depth=1, max_seq_len=TIME, local_attn_window_size=4, heads=2,
        dim_head=16, causal=True,
    )  # fmt: skip
    return model, (ids(TIME),)


@stranger("linformer")
def linformer() -> Built:
    from linformer import Linformer

    return Linformer(dim=32, seq_len=TIME, depth=1, heads=4, k=4), (x(TIME, 32),)


@stranger("axial-positional-embedding")
def axial_embedding() -> Built:
    from axial_positional_embedding import AxialPositionalEmbedding

    return AxialPositionalEmbedding(dim=32, axial_shape=(4, 2)), (x(TIME, 32),)


@stranger("rotary-embedding-torch")
def rotary_embedding() -> Built:
    from rotary_embedding_torch import RotaryEmbedding

    rotary = RotaryEmbedding(dim=8, learned_freq=True)
    return Calls(rotary, lambda m, q: m.rotate_queries_or_keys(q)), (x(2, TIME, 8),)


@stranger("conformer")
def conformer() -> Built:
    from conformer import ConformerBlock

    return ConformerBlock(dim=32, dim_head=8, heads=4, conv_kernel_size=5), (x(TIME, 32),)


@stranger("mambapy")
def mamba() -> Built:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=2, d_state=4)), (x(TIME, 16),)


@stranger("hyper-connections")
def hyper_connections() -> Built:
    from hyper_connections import HyperConnections

    return Wide(HyperConnections.get_init_and_expand_reduce_stream_functions(2)), (x(TIME, 16),)


class Wide(nn.Module):
    """A linear layer between the streams of hyper-connections."""

    def __init__(self, functions: Any) -> None:
        super().__init__()
        init, self.expand, self.reduce = functions[:3]
        self.layer = init(dim=16, branch=nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.layer(self.expand(x)))


@stranger("loralib")
def loralib() -> Built:
    import loralib

    return nn.Sequential(
        loralib.Linear(16, 32, r=4),
        nn.GELU(),
        loralib.MergedLinear(32, 48, r=4, enable_lora=[True, False, True]),
    ), (x(TIME, 16),)


# Pictures and sounds


@stranger("diffusers")
def diffusers() -> Built:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return Calls(model, lambda m, image, t: m(image, t).sample), (x(3, 16, 16), ids(high=100))


@stranger("monai")
def monai() -> Built:
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2),
        num_res_units=1,
    ), (x(1, 8, 8, 8),)  # fmt: skip


@stranger("kornia")
def kornia() -> Built:
    from kornia.filters import GaussianBlur2d, SpatialGradient

    return nn.Sequential(
        nn.Conv2d(3, 4, 3), GaussianBlur2d((3, 3), (1.0, 1.0)), SpatialGradient()
    ), (x(3, 16, 16),)


@stranger("efficientnet-pytorch")
def efficientnet() -> Built:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", image_size=64, num_classes=5), (x(3, 64, 64),)


@stranger("slot-attention")
def slot_attention() -> Built:
    from slot_attention import SlotAttention

    model = SlotAttention(num_slots=3, dim=16, iters=2)
    return Calls(model, lambda m, t: m(t)), (x(TIME, 16),)


@stranger("siren-pytorch")
def siren() -> Built:
    from siren_pytorch import SirenNet

    return SirenNet(dim_in=2, dim_hidden=32, dim_out=3, num_layers=3), (x(2),)


@stranger("vector-quantize-pytorch")
def vector_quantize() -> Built:
    from vector_quantize_pytorch import FSQ

    return nn.Sequential(nn.Linear(8, 4), FSQ(levels=[5, 5, 3, 3])), (x(TIME, 8),)


@stranger("asteroid-filterbanks")
def asteroid_filterbanks() -> Built:
    from asteroid_filterbanks import Encoder, FreeFB

    return Encoder(FreeFB(n_filters=16, kernel_size=8, stride=4)), (x(1, 64),)


@stranger("nnAudio")
def nn_audio() -> Built:
    from nnAudio.features import STFT

    return STFT(n_fft=16, hop_length=8, trainable=True, verbose=False), (x(64),)


@stranger("torch-dct")
def torch_dct() -> Built:
    import torch_dct

    return Calls(nn.Linear(8, 8), lambda m, t: torch_dct.idct(m(torch_dct.dct(t)))), (x(3, 8),)


# Tables, series, recommendation


@stranger("pytorch-tabnet")
def tabnet() -> Built:
    from pytorch_tabnet.tab_network import TabNet

    group = torch.eye(6)
    return TabNet(
        6, 2, n_d=4, n_a=4, n_steps=2, virtual_batch_size=BATCH, group_attention_matrix=group
    ), (x(6),)


@stranger("rtdl-num-embeddings")
def rtdl_embeddings() -> Built:
    from rtdl_num_embeddings import PeriodicEmbeddings

    return PeriodicEmbeddings(4, 8, lite=False), (x(4),)


@stranger("rtdl-revisiting-models")
def rtdl_models() -> Built:
    from rtdl_revisiting_models import FTTransformer

    options = FTTransformer.get_default_kwargs(n_blocks=1)
    options.update(d_block=16, attention_n_heads=2)
    return FTTransformer(n_cont_features=3, cat_cardinalities=[4, 5], d_out=2, **options), (
        x(3),
        ids(2, high=4),
    )


@stranger("nbeats-pytorch")
def nbeats() -> Built:
    from nbeats_pytorch.model import NBeatsNet

    return NBeatsNet(
        backcast_length=TIME, forecast_length=4, hidden_layer_units=16, nb_blocks_per_stack=1
    ), (x(TIME),)


@stranger("pytorch-tcn")
def tcn() -> Built:
    from pytorch_tcn import TCN

    return TCN(num_inputs=4, num_channels=[8, 8], kernel_size=3, causal=True), (x(4, 16),)


@stranger("ncps")
def ncps() -> Built:
    from ncps.torch import CfC
    from ncps.wirings import AutoNCP

    return CfC(4, AutoNCP(12, 3)), (x(TIME, 4),)


@stranger("deepctr-torch")
def deepctr() -> Built:
    from deepctr_torch.layers import CIN, DNN, CrossNet

    model = nn.ModuleList([CrossNet(12), DNN(12, (16, 8)), CIN(3, (8, 4))])

    def call(m: Any, flat: torch.Tensor) -> Any:
        return m[0](flat), m[1](flat), m[2](flat.reshape(-1, 3, 4))

    return Calls(model, call), (x(12),)


# Physics, graphs, probability


@stranger("neuraloperator")
def neural_operator() -> Built:
    from neuralop.models import FNO

    return FNO(n_modes=(4, 4), hidden_channels=8, in_channels=2, out_channels=1, n_layers=2), (
        x(2, 8, 8),
    )


@stranger("torch-harmonics")
def torch_harmonics() -> Built:
    from torch_harmonics import InverseRealSHT, RealSHT

    return nn.Sequential(nn.Linear(16, 16), RealSHT(8, 16), InverseRealSHT(8, 16)), (x(3, 8, 16),)


@stranger("e3nn")
def e3nn() -> Built:
    from e3nn import o3

    return o3.Linear("4x0e + 2x1o", "3x0e + 2x1o"), (x(10),)


@stranger("egnn-pytorch")
def egnn() -> Built:
    from egnn_pytorch import EGNN

    return EGNN(dim=8), (x(TIME, 8), x(TIME, 3))


@stranger("invariant-point-attention")
def invariant_point_attention() -> Built:
    from invariant_point_attention import InvariantPointAttention

    model = InvariantPointAttention(dim=16, heads=2, require_pairwise_repr=False)

    def call(m: Any, t: torch.Tensor, shift: torch.Tensor) -> Any:
        turn = torch.eye(3, dtype=t.dtype).expand(t.shape[0], t.shape[1], 3, 3)
        return m(t, rotations=turn, translations=shift)

    return Calls(model, call), (x(TIME, 16), x(TIME, 3))


@stranger("torch-geometric")
def torch_geometric() -> Built:
    from torch_geometric.nn import DenseGCNConv, DenseSAGEConv

    model = nn.ModuleList([DenseGCNConv(8, 16), DenseSAGEConv(16, 4)])
    return Calls(model, lambda m, t, a: m[1](m[0](t, a).relu(), a)), (
        x(TIME, 8),
        (x(TIME, TIME) > 0).float(),
    )


@stranger("torchani")
def torchani() -> Built:
    from torchani.nn import AtomicNetwork

    return AtomicNetwork(layer_dims=(12, 16, 8, 1), activation="celu", bias=True), (x(TIME, 12),)


@stranger("nflows")
def nflows() -> Built:
    from nflows.transforms import MaskedAffineAutoregressiveTransform

    return MaskedAffineAutoregressiveTransform(features=6, hidden_features=16), (x(6),)


@stranger("normflows")
def normflows() -> Built:
    from normflows.flows import MaskedAffineAutoregressive

    return MaskedAffineAutoregressive(features=6, hidden_features=16), (x(6),)


@stranger("zuko")
def zuko() -> Built:
    from zuko.flows import MAF

    return Calls(
        MAF(features=4, transforms=2, hidden_features=(16,)), lambda m, t: m().log_prob(t)
    ), (x(4),)


@stranger("torchdiffeq")
def torchdiffeq() -> Built:
    from torchdiffeq import odeint

    times = torch.linspace(0, 1, 4, dtype=torch.float64)
    net = Calls(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)), lambda m, _, y: m(y))
    return Calls(
        net, lambda m, y: odeint(lambda t, y: m(t, y), y, times.to(y.dtype), method="rk4")
    ), (x(4),)


@stranger("torchdyn")
def torchdyn() -> Built:
    from torchdyn.nn import Augmenter

    return nn.Sequential(Augmenter(1, 3), nn.Linear(7, 4)), (x(4),)


@stranger("gpytorch")
def gpytorch() -> Built:
    from gpytorch.kernels import RBFKernel, ScaleKernel

    return Calls(ScaleKernel(RBFKernel()), lambda m, a: m(a).to_dense()), (x(TIME, 3),)


@stranger("pyro-ppl")
def pyro() -> Built:
    from pyro.nn import AutoRegressiveNN

    return AutoRegressiveNN(6, [16]), (x(6),)


@stranger("torchbnn")
def torchbnn() -> Built:
    import torchbnn

    layer = torchbnn.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=6, out_features=4)
    layer.freeze()
    return layer, (x(6),)


@stranger("pykan")
def kan() -> Built:
    from kan.KANLayer import KANLayer

    return Calls(KANLayer(in_dim=4, out_dim=3, num=3, k=3), lambda m, t: m(t)[0]), (x(4),)


@stranger("tensorly-torch")
def tensorly_torch() -> Built:
    from tltorch import FactorizedLinear

    return FactorizedLinear((4, 4), (2, 4), rank=0.5, factorization="cp"), (x(16),)


@stranger("geotorch")
def geotorch() -> Built:
    import geotorch

    layer = nn.Linear(8, 6)
    geotorch.orthogonal(layer, "weight")
    return layer, (x(8),)


# Spikes, sequences, metrics


@stranger("snntorch")
def snntorch() -> Built:
    import snntorch

    layers = nn.ModuleList([nn.Linear(6, 8), snntorch.Leaky(beta=0.9, learn_beta=True)])
    return Calls(layers, lambda m, t: m[1](m[0](t), torch.zeros_like(m[0](t)))), (x(6),)


@stranger("spikingjelly")
def spikingjelly() -> Built:
    from spikingjelly.activation_based import functional, neuron, surrogate

    net = nn.Sequential(
        nn.Linear(6, 8), neuron.LIFNode(surrogate_function=surrogate.ATan()), nn.Linear(8, 2)
    )

    def call(m: Any, t: torch.Tensor) -> Any:
        functional.reset_net(m)
        return m(t)

    return Calls(net, call), (x(6),)


@stranger("pytorch-crf")
def crf() -> Built:
    from torchcrf import CRF

    return Calls(CRF(4, batch_first=True), lambda m, e, t: -m(e, t)), (
        x(TIME, 4),
        ids(TIME, high=4),
    )


@stranger("entmax")
def entmax() -> Built:
    from entmax import Entmax15, Sparsemax

    return nn.Sequential(nn.Linear(6, 8), Sparsemax(-1), nn.Linear(8, 4), Entmax15(-1)), (x(6),)


@stranger("ptwt")
def ptwt() -> Built:
    import ptwt

    return Calls(nn.Linear(16, 16), lambda m, t: tuple(ptwt.wavedec(m(t), "haar", level=2))), (
        x(16),
    )


@stranger("einops")
def einops() -> Built:
    from einops.layers.torch import EinMix, Rearrange, Reduce

    return nn.Sequential(
        Rearrange("b (h p) c -> b h (p c)", p=2),
        EinMix("b h c -> b h d", weight_shape="c d", bias_shape="d", c=8, d=6),
        Reduce("b h d -> b d", "mean"),
    ), (x(TIME, 4),)


@stranger("opt-einsum")
def opt_einsum() -> Built:
    import opt_einsum

    def call(m: Any, t: torch.Tensor) -> Any:
        return opt_einsum.contract("bi,oi,po->bp", t, m[0].weight, m[1].weight)

    return Calls(nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 3)]), call), (x(6),)


@stranger("pytorch-metric-learning")
def metric_learning() -> Built:
    from pytorch_metric_learning.losses import ArcFaceLoss

    loss = ArcFaceLoss(num_classes=4, embedding_size=6)
    return Calls(loss, lambda m, e, y: m(e, y)), (x(6), ids(high=4))


@stranger("torchrl")
def torchrl() -> Built:
    from torchrl.modules.models import MLP

    return MLP(in_features=6, out_features=2, num_cells=[16, 16]), (x(6),)


@stranger("botorch")
def botorch() -> Built:
    from botorch.models.utils.gpytorch_modules import get_matern_kernel_with_gamma_prior

    return Calls(
        get_matern_kernel_with_gamma_prior(ard_num_dims=3), lambda m, a: m(a).to_dense()
    ), (x(TIME, 3),)


@stranger("sentence-transformers")
def sentence_transformers() -> Built:
    from sentence_transformers.models import Dense, Pooling

    pool = nn.ModuleList([Dense(8, 8), Pooling(8, pooling_mode="mean")])

    def call(m: Any, t: torch.Tensor, mask: torch.Tensor) -> Any:
        tokens = m[0]({"sentence_embedding": t})["sentence_embedding"]
        return m[1]({"token_embeddings": tokens, "attention_mask": mask})["sentence_embedding"]

    return Calls(pool, call), (x(TIME, 8), ids(TIME, high=2))


# Training and files


@stranger("torch")
def torch_encoder() -> Built:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Linear(16, 3)), (x(TIME, 16),)


@stranger("transformers")
def transformers() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_positions=TIME, n_embd=16, n_layer=2, n_head=2)
    return Calls(GPT2LMHeadModel(config), lambda m, t: m(t).logits), (ids(TIME),)


@stranger("peft")
def peft() -> Built:
    from peft import LoraConfig, get_peft_model

    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    config = LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"], init_lora_weights=False)
    return get_peft_model(net, config), (x(8),)


@stranger("huggingface-hub")
def hub() -> Built:
    return hub_net()(8, 16), (x(8),)


@functools.cache
def hub_net() -> Any:
    from huggingface_hub import PyTorchModelHubMixin

    class Net(nn.Module, PyTorchModelHubMixin):
        def __init__(self, wide: int, hidden: int) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(wide, hidden), nn.BatchNorm1d(hidden)
            self.down = nn.Linear(hidden, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.norm(self.up(x)).tanh())

    return Net


@stranger("ema-pytorch")
def ema_pytorch() -> Built:
    from ema_pytorch import EMA

    averaged = EMA(nn.Linear(6, 4), beta=0.5, update_after_step=0, update_every=1)
    return Calls(averaged, lambda m, t: m.model(t)), (x(6),)


@stranger("pytorch-ignite")
def ignite() -> Built:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), (x(6),)


@stranger("skorch")
def skorch() -> Built:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), (x(6),)


@stranger("stable-baselines3")
def stable_baselines() -> Built:
    from gymnasium.spaces import Box
    from stable_baselines3.common.policies import ActorCriticPolicy

    policy = ActorCriticPolicy(Box(-1, 1, (6,)), Box(-1, 1, (2,)), lambda _: 0.1)
    return Calls(policy, lambda m, t: m.evaluate_actions(t[:, :6], t[:, 6:])), (x(8),)
