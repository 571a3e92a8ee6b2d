"""Our modules inside other people's models: whatever a framework does to these, numbers stay.

Each framework builds, saves and loads in its own way: on the meta device, with buffers that it
refills, with hooks that move weights between devices.
"""

import copy

import pytest
import torch

from support.modules import TOKENS, WIDTH, Everything, kept

pytestmark = pytest.mark.filterwarnings("ignore")
FLOATS = ["delta", "freqs", "skew", "frequencies"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def with_each_dtype(name, single, half):
    """One value of an option with float32, the other with bfloat16."""
    values = [(torch.float32, single), (torch.bfloat16, half)]
    return pytest.mark.parametrize(("dtype", name), values, ids=["fp32", "bf16"])


@pytest.fixture
def plain():
    torch.manual_seed(3)
    return Everything()


def assert_same_numbers(got, plain, dtype):
    """As a module that nobody touched, with the same weights in the same dtype."""
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    floats = {name for name, p in got.named_parameters() if p.dtype == torch.float32}
    assert floats == (
        kept(got) if dtype != torch.float32 else {n for n, _ in got.named_parameters()}
    )
    wanted = copy.deepcopy(plain).to(dtype)(x)
    assert wanted.isfinite().all()
    assert torch.equal(got(x), wanted)
    assert torch.equal(copy.deepcopy(got)(x), wanted)


@with_each_dtype("device_map", "cpu", None)
def test_from_pretrained_leaves_every_encoding_exact(tmp_path, plain, dtype, device_map):
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "everything"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.ours = Everything()
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, x):
            return self.ours(x)

    model = Model(Config())
    model.ours.load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path, dtype=dtype, device_map=device_map)
    assert_same_numbers(loaded, plain, dtype)


@with_each_dtype("low_memory", False, True)
def test_diffusers_from_pretrained_leaves_every_encoding_exact(tmp_path, plain, dtype, low_memory):
    pytest.importorskip("diffusers")
    from diffusers import ConfigMixin, ModelMixin
    from diffusers.configuration_utils import register_to_config

    class Model(ModelMixin, ConfigMixin):
        # With little memory, diffusers assigns what it loads in its own dtype, except for these.
        _keep_in_fp32_modules = FLOATS if low_memory else None

        @register_to_config
        def __init__(self):
            super().__init__()
            self.ours = Everything()

        def forward(self, x):
            return self.ours(x)

    model = Model()
    model.ours.load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path, torch_dtype=dtype, low_cpu_mem_usage=low_memory)
    assert_same_numbers(loaded, plain, dtype)


@with_each_dtype("assign", False, True)
def test_a_module_built_on_meta_and_loaded_is_exact(tmp_path, plain, dtype, assign):
    torch.save(plain.state_dict(), tmp_path / "weights.pt")
    with torch.device("meta"):
        loaded = Everything()
    if not assign:
        loaded.to_empty(device="cpu")
    loaded.load_state_dict(torch.load(tmp_path / "weights.pt"), assign=assign)
    assert_same_numbers(loaded.to(dtype), plain, dtype)
    torch.save(loaded, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert_same_numbers(whole, plain, dtype)


@with_each_dtype("include_buffers", True, False)
def test_accelerate_loading_and_offloading_leaves_every_encoding_exact(
    tmp_path, plain, dtype, include_buffers
):
    accelerate = pytest.importorskip("accelerate")
    torch.save(plain.to(dtype).state_dict(), tmp_path / "weights.bin")
    with accelerate.init_empty_weights(include_buffers=include_buffers):
        # The argument dtype of the next call would round what keeps float32.
        empty = Everything().to(dtype)
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty, str(tmp_path / "weights.bin"), device_map={"": "cpu"}
    )
    assert_same_numbers(loaded, plain, dtype)
    x = torch.randn(2, TOKENS, WIDTH).to(dtype)
    wanted = plain(x)
    offloaded = accelerate.cpu_offload(
        copy.deepcopy(plain), execution_device="cpu", offload_buffers=include_buffers
    )
    assert torch.equal(offloaded(x), wanted)
