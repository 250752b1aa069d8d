"""Networks of torchvision and timm, one of each family, where these are installed: in evaluation,
and in training, where batch normalization takes its statistics over the whole batch."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.zoo import check
from tests.zoo.inputs import Batch

TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3
    maxvit_t mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18
    resnet50 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16
    wide_resnet50_2
"""
TIMM = """
    bat_resnext26ts beit_base_patch16_224 botnet26t_256 caformer_s18 cait_xxs24_224 coat_tiny
    coatnet_nano_rw_224 convit_tiny convmixer_768_32 convnext_atto convnextv2_atto crossvit_tiny_240
    cs3darknet_s cspresnet50 davit_tiny deit_tiny_patch16_224 dla34 dm_nfnet_f0 dpn48b eca_nfnet_l0
    ecaresnet26t edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvit_b0
    efficientvit_m0 eva02_tiny_patch14_224 fastvit_t8 focalnet_tiny_srf gcresnet33ts gcvit_xxtiny
    gernet_s ghostnet_050 ghostnetv2_100 haloregnetz_b hardcorenas_a hgnet_tiny hgnetv2_b0
    hiera_tiny_224 hrnet_w18_small inception_next_tiny inception_resnet_v2 inception_v4
    lambda_resnet26t lcnet_035 legacy_senet154 levit_128s maxvit_rmlp_pico_rw_256 mixer_s32_224
    mixnet_s mnasnet_small mobileone_s0 mobilevit_xxs mobilevitv2_050 mvitv2_tiny nest_tiny
    nf_resnet26 nextvit_small pit_ti_224 poolformer_s12 pvt_v2_b0 regnetx_002 regnety_002
    regnetz_b16 repghostnet_050 repvgg_a0 repvit_m1 res2net50_14w_8s resmlp_12_224 resnest14d
    resnet14t resnetrs50 resnetv2_50 rexnet_100 rexnetr_100 sebotnet33ts_256 selecsls42
    sequencer2d_s skresnet18 spnasnet_100 starnet_s1 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
    swinv2_tiny_window8_256 tf_efficientnetv2_b0 tiny_vit_5m_224 tinynet_e tnt_s_legacy_patch16_224
    tresnet_m twins_pcpvt_small vgg11 visformer_tiny vit_tiny_patch16_224 volo_d1_224 vovnet39a
    xception41 xcit_nano_12_p16_224
"""
PACKAGES = {"torchvision": TORCHVISION.split(), "timm": TIMM.split()}


class Network(NamedTuple):
    """``name``: package.network, in training if it ends so."""

    name: str
    side: int

    @property
    def shown(self) -> str:
        return f"{self.side} x {self.side}"

    def build(self) -> tuple[nn.Module, Batch]:
        name, _, training = self.name.partition(", ")
        package, _, network = name.partition(".")
        torch.manual_seed(3)
        model = MAKERS[package](network, self.side).to(torch.float64).train(bool(training))
        for module in model.modules():
            for key in ("p", "drop_prob"):
                if isinstance(getattr(module, key, None), float):
                    setattr(module, key, 0.0)
        image = torch.randn(3, 3, self.side, self.side, dtype=torch.float64)
        return Positional(model), {"image": image}


class Positional(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> Any:
        return self.model(image)


def of_torchvision(name: str, side: int) -> Any:
    models = importlib.import_module("torchvision.models")
    own: dict[str, Any] = {
        "vit_b_16": {"image_size": side},
        "maxvit_t": {"input_size": (side, side)},
    }
    if name in ("googlenet", "inception_v3"):
        own[name] = {"init_weights": False, "aux_logits": False}
    return models.get_model(name, weights=None, num_classes=10, **own.get(name, {}))


def of_timm(name: str, side: int) -> Any:
    timm = importlib.import_module("timm")
    try:
        return timm.create_model(name, num_classes=10, img_size=side)
    except TypeError:  # a network of convolutions, which takes every size
        return timm.create_model(name, num_classes=10)


MAKERS = {"torchvision": of_torchvision, "timm": of_timm}


def names() -> list[str]:
    """Those of the packages that are installed."""
    return [
        f"{package}.{network}{mode}"
        for package, networks in PACKAGES.items()
        if importlib.util.find_spec(package)
        for network in networks
        for mode in ("", ", in training")
    ]


def network(name: str) -> Network:
    """With the smallest image that it takes. Raises what the last one gave."""
    error: Exception = ValueError("no size was tried")
    for side in (64, 96, 128, 224, 256):
        found = Network(name, side)
        try:
            check.run(*found.build())
            return found
        except Exception as raised:
            error = raised
    raise error
