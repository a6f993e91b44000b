"""Adapters that people bring: read, continued, held against, and written in every format as
diffusers itself reads them."""

import dataclasses
import functools
import json

import diffusers
import huggingface_hub
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from g2rpo import api
from g2rpo.config.read import completed, load_config
from g2rpo.core.errors import UserError
from g2rpo.data.testbed import pipeline_dir
from g2rpo.lab.export import tensors_for
from g2rpo.models.adapter_files import FLOATS, HARMLESS, PeftConfig, read_adapter
from g2rpo.models.adapters import DOWN, PREFIX, UP, Adapter, write_tensors
from g2rpo.models.blueprint import build_on_meta, build_shallow, read_blueprint, size_of
from g2rpo.models.catalogue import SPECS
from g2rpo.models.hub import find_adapter
from g2rpo.models.options import PolicyConfig
from tests.support.adapters import READ, fused, policy_of, random_adapter, velocities_with, velocity
from tests.support.commands import done, g2rpo, refused
from tests.support.policies import moved
from tests.support.tiny import flux_pipeline
from tests.support.tiny_pipelines import tiny_pipeline
from tests.support.tolerances import network, rounding
from tests.support.variants import few

KIND = "FluxPipeline"
ENDS = ["to_q", "to_k", "to_v", "to_out.0"]
CONTINUED = {"lora_rank": 3, "lora_alpha": 6.0, "lora_targets": ENDS}
QUICK = ("ZImagePipeline", "Flux2KleinPipeline")
CASES = [(kind, format) for format, kinds in READ.items() for kind in kinds]


@pytest.mark.parametrize(("kind", "format"), few(CASES, (QUICK[1], "kohya").__eq__))
def test_velocities_with_a_file_are_diffusers_own_whether_it_is_read_or_written(
    kind, format, tmp_path
):
    """But for the order of sums; the files are exact."""
    velocities, allowed = velocities_with(kind, format, tmp_path)
    for ours, theirs in velocities:
        torch.testing.assert_close(ours, theirs, **allowed)


def assert_same(found, expected):
    """Velocities of the tiny FLUX whose weights are the same, but added in other places."""
    torch.testing.assert_close(found, expected, **network(expected.abs().max()))


def flux_of_real_width():
    """An adapter with the matrices of FLUX.1's first blocks, for which diffusers' kohya converter
    has the widths."""
    width, draw = 3072, torch.Generator().manual_seed(0)
    joint = {f"attn.to_{each}": (width, width) for each in "qkv"}
    double = {
        **joint,
        **{f"attn.add_{each}_proj": (width, width) for each in "qkv"},
        "ff.net.0.proj": (width, 4 * width),
        "ff.net.2": (4 * width, width),
        "attn.to_out.0": (width, width),
    }
    single = {**joint, "proj_out": (5 * width, width)}
    modules = {f"transformer_blocks.0.{name}": size for name, size in double.items()}
    modules |= {f"single_transformer_blocks.0.{name}": size for name, size in single.items()}
    return Adapter(
        {
            name: (torch.randn(2, i, generator=draw), torch.randn(o, 2, generator=draw))
            for name, (i, o) in modules.items()
        }
    )


def test_a_kohya_file_of_flux_has_joint_matrices_and_comes_back_exactly(tmp_path):
    """What is absent of a joint matrix, here the mlp of the block of one stream, comes back as no
    change."""
    adapter, file = flux_of_real_width(), tmp_path / "kohya.safetensors"
    write_tensors(file, tensors_for(adapter, SPECS[KIND].comfyui, "kohya"), {})
    assert "lora_unet_single_blocks_0_linear1.lora_up.weight" in load_file(file)
    back, absent = read_adapter(file, FluxPipeline), "single_transformer_blocks.0.proj_mlp"
    assert not back.layers.pop(absent)[1].any()
    assert is_same(back, adapter)


def test_alphas_beside_the_original_names_of_wan_are_read(tmp_path):
    """As files of distilled Wan have them. diffusers' converter multiplies in place."""
    wan = tiny_pipeline("WanPipeline")
    adapter, file = random_adapter(wan.transformer), tmp_path / "wan.safetensors"
    tensors = {}
    for name, value in tensors_for(adapter, SPECS["WanPipeline"].comfyui, "comfyui").items():
        tensors[name.replace("lora_A", "lora_down").replace("lora_B", "lora_up")] = value
        if name.endswith(UP):  # twice the rank
            tensors[name.removesuffix(UP) + ".alpha"] = torch.tensor(6.0)
    save_file(tensors, file)
    back = read_adapter(file, type(wan), wan.transformer)
    twice = Adapter({module: (down, 2 * up) for module, (down, up) in adapter.layers.items()})
    assert back.scale == 2 and is_same(back, twice)


@functools.cache
def transformer():
    return flux_pipeline().transformer


def read(file):
    return read_adapter(file, FluxPipeline, transformer())


@pytest.fixture(scope="module")
def brought():
    return random_adapter(transformer(), ENDS)


@pytest.fixture
def file(brought, tmp_path):
    brought.write(tmp_path / "brought.safetensors", PREFIX)
    return tmp_path / "brought.safetensors"


def halved(file, prefix, adapter):
    """An adapter's tensors with half of each second factor."""
    adapter.write(file, prefix)
    tensors = load_file(file)
    return {name: value / 2 if name.endswith(UP) else value for name, value in tensors.items()}


def as_peft(adapter, folder):
    """As peft itself saves: alpha is beside the tensors."""
    file = folder / "adapter_model.safetensors"
    save_file(halved(file, "base_model.model.", adapter), file)
    config = {"r": 3, "lora_alpha": 6, "rank_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return file


def with_alphas(adapter, folder):
    """As some trainers save: diffusers' names with alphas."""
    file = folder / "alphas.safetensors"
    alphas = {f"{PREFIX}{module}.alpha": torch.tensor(6.0) for module in adapter.layers}
    save_file(halved(file, PREFIX, adapter) | alphas, file)
    return file


def as_kohya(adapter, folder):
    tensors = tensors_for(adapter, SPECS["ZImagePipeline"].comfyui, "kohya")
    by = {"alpha": 2.0, "lora_up.weight": 0.5, "lora_down.weight": 1.0}
    raw = {name: value * by[name.partition(".")[2]] for name, value in tensors.items()}
    save_file(raw, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


@pytest.mark.parametrize(
    ("kind", "make"), [(KIND, as_peft), (KIND, with_alphas), ("ZImagePipeline", as_kohya)]
)
def test_alpha_is_the_files_and_factors_are_as_they_were_trained(kind, make, tmp_path):
    pipeline = tiny_pipeline(kind)
    adapter = random_adapter(pipeline.transformer, ENDS)
    found = read_adapter(make(adapter, tmp_path), type(pipeline))
    assert (found.scale, found.rank) == (2.0, 3) and is_same(found, adapter)


def test_the_last_modulation_of_flux2_is_read_with_scale_before_shift(tmp_path):
    """As diffusers has it; the original weights, and so ai-toolkit's files, have the shift
    first."""
    pipeline = tiny_pipeline("Flux2KleinPipeline")
    adapter = random_adapter(pipeline.transformer, ["norm_out.linear"])
    ((down, up),) = adapter.layers.values()
    last = "final_layer.adaLN_modulation.1"
    swapped = Adapter({last: (down, torch.cat(up.chunk(2)[::-1]))})
    swapped.write(tmp_path / "it.safetensors", "diffusion_model.")
    assert is_same(read_adapter(tmp_path / "it.safetensors", type(pipeline)), adapter)


def test_the_start_stays_while_the_adapter_is_trained_and_strength_leads_from_one_to_the_other(
    file, tmp_path
):
    policy = policy_of(KIND, flux_pipeline(), "lora", adapter=str(file), **CONTINUED)
    start = velocity(policy)
    plain = velocity(policy_of(KIND, flux_pipeline()))
    assert float((start - plain).abs().max()) > 1e-2
    changed = velocity(moved(policy))
    assert float((start - changed).abs().max()) > 1e-2
    assert [name for name in policy.tuning.named() if ".default." not in name] == []
    with policy.base():
        assert torch.equal(velocity(policy), start)  # to the bit, as before the first update
        assert all(value.requires_grad for value in policy.trainable_parameters())
    assert torch.equal(velocity(policy), changed)
    saved = policy.save(tmp_path / "tuned")
    assert not any("start" in name for name in load_file(saved))
    sampled = policy_of(KIND, flux_pipeline(), adapter=str(file), keep_base=True)
    assert_same(velocity(sampled), start)
    for strength, expected in ((0.0, start), (1.0, changed)):
        if strength == 0:
            sampled.load(tmp_path / "tuned", 0.0)
        sampled.tuning.scale(strength)
        assert_same(velocity(sampled), expected)
        with sampled.base():
            assert_same(velocity(sampled), start)
    fresh = flux_pipeline()
    fused(fresh, saved)
    assert_same(velocity(policy_of(KIND, fresh)), changed)


@pytest.mark.parametrize("named", ["", "/lora/adapter_model.safetensors"])
def test_an_adapter_of_peft_on_the_hub_comes_with_its_config(brought, tmp_path, monkeypatch, named):
    """From a hub that is a folder here, one file at a time."""
    there, cache = tmp_path / "hub", tmp_path / "cache"
    folder = there / "lora" if named else there
    folder.mkdir(parents=True)
    as_peft(brought, folder)
    (folder / "training.safetensors").touch()
    files = [path.relative_to(there).as_posix() for path in there.rglob("*.*")]

    def download(repository, file):
        (cache / file).parent.mkdir(parents=True, exist_ok=True)
        (cache / file).write_bytes((there / file).read_bytes())
        return str(cache / file)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repository: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("g2rpo.models.hub.obstacle", lambda repository: None)
    read = read_adapter(find_adapter(f"someone/theirs{named}"))
    assert read.scale == 2.0 and is_same(read, brought)


def test_a_plan_has_the_bytes_of_the_start(file, flux_directory):
    """Beside the trained adapter, in float32."""
    size = {"height": 32, "width": 32, "max_sequence_length": 12, "dtype": "bfloat16", **CONTINUED}
    sizes = []
    for own in ({}, {"adapter": str(file)}):
        config = PolicyConfig(path=str(flux_directory), **size, **own)
        policy = build_on_meta(read_blueprint(config), config)
        sizes.append(size_of(policy.pipeline.transformer))
        trained = sum(value.nbytes for value in policy.trainable_parameters())
    assert sizes[1] - sizes[0] == trained


def test_plans_and_checks_with_fewer_blocks_take_an_adapter_of_the_last_ones(tmp_path):
    """As of a large model, which is built with two blocks of each kind before it is loaded."""
    pipeline = tiny_pipeline("ZImagePipeline")
    assert len(pipeline.transformer.layers) == 3
    pipeline.save_pretrained(tmp_path / "model")
    adapter = random_adapter(
        pipeline.transformer, ["layers.2.attention.to_q", "layers.2.feed_forward.w2"]
    )
    adapter.write(tmp_path / "last.safetensors", PREFIX)
    size = [
        f"policy.path={tmp_path / 'model'}",
        "policy.height=32",
        "policy.width=32",
        "policy.max_sequence_length=24",
    ]
    own = [*size, f"policy.adapter={tmp_path / 'last.safetensors'}", "policy.device=cpu"]
    config = completed(load_config("z-image-lora", own))
    assert config.policy.lora_targets == ["2.attention.to_q", "2.feed_forward.w2"]
    policy, times = build_shallow(read_blueprint(config.policy), config.policy)
    whole = build_on_meta(read_blueprint(config.policy), config.policy)
    assert times[-3:] == [1, 1, 1] and policy.tuning.named().keys() == whole.tuning.named().keys()


def test_a_config_is_read_without_opening_the_adapter_that_it_names():
    """The recipe's own values are left out; those that the user sets stay, to be compared with the
    adapter's."""
    notes = []
    policy = load_config(
        "z-image-lora", ["policy.adapter=absent.safetensors", "policy.lora_alpha=3"], notes.append
    ).policy
    assert not {"lora_rank", "lora_targets"} & policy.model_fields_set and policy.lora_alpha == 3
    assert any(
        "policy.adapter=absent.safetensors: its own rank" in note and "lora_rank=" in note
        for note in notes
    )
    with pytest.raises(
        UserError, match=r"policy.adapter=absent.safetensors: there is no such file"
    ):
        completed(
            load_config(
                "z-image-lora",
                [
                    "policy.adapter=absent.safetensors",
                    f"policy.path={pipeline_dir()}",
                    "policy.pipeline=",
                ],
            )
        )


def test_full_tuning_begins_with_the_adapter_merged_in(file, tmp_path):
    expected = velocity(policy_of(KIND, fused(flux_pipeline(), file)))
    policy = policy_of(KIND, flux_pipeline(), "full", adapter=str(file))
    assert_same(velocity(policy), expected)
    changed = velocity(moved(policy, 0.02))
    with policy.base():
        assert_same(velocity(policy), expected)
    policy.save(tmp_path / "full")
    sampled = policy_of(KIND, flux_pipeline(), adapter=str(file), keep_base=True)
    sampled.load(tmp_path / "full")
    assert_same(velocity(sampled), changed)
    with sampled.base():
        assert_same(velocity(sampled), expected)


@pytest.mark.slow
def test_a_run_continues_an_adapter_and_exports_both_and_what_was_learnt(
    tiny_config, flux_directory, file, tmp_path, capsys
):
    """lora_rank=2 of the config file disagrees with the adapter's 3, so it is taken out."""
    run, own = tmp_path / "run", [f"policy.adapter={file}"]
    kl = ["algorithm.kl_weight=0.1", "rewards.brightness=1", "optim.learning_rate=0.02"]
    kl += ["algorithm.name=flow_grpo", "algorithm.group_size=4", "optim.ema_decay=0.5"]
    tiny_config.write_text(tiny_config.read_text().replace("lora_rank: 2", ""))
    code, out, err = g2rpo(
        capsys, "train", tiny_config, *own, *kl, "trainer.iterations=1", "--run-dir", run
    )
    assert code == 0, err
    assert "rank 3, alpha 3 and 7 modules" in " ".join((out + err).split())
    code, _, err = g2rpo(capsys, "resume", run, "trainer.iterations=2")
    assert code == 0, err

    config = api.sampler(run, base=True).policy.options
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (3, 3.0, sorted(ENDS))
    prompts = ["a red circle"]
    start = policy_of(
        KIND, fused(FluxPipeline.from_pretrained(flux_directory), file), max_sequence_length=12
    )
    base, tuned = velocity(api.sampler(run, base=True).policy), velocity(api.sampler(run).policy)
    assert_same(base, velocity(start))
    assert float((base - tuned).abs().max()) > 1e-4
    pictures = api.sample(run, prompts, base=True)
    assert not torch.equal(pictures, api.sample(run, prompts))

    both, learnt = (
        read_adapter(api.export(run, "diffusers", learnt=each) / "pytorch_lora_weights.safetensors")
        for each in (0, 1)
    )
    assert (both.rank, learnt.rank) == (3, 6)
    loaded = fused(
        fused(FluxPipeline.from_pretrained(flux_directory), file),
        api.export(run, "comfyui", learnt=True),
    )
    assert_same(velocity(policy_of(KIND, loaded, max_sequence_length=12)), tuned)
    last = read_adapter(
        api.export(run, "comfyui", checkpoint="last", out=tmp_path / "last.safetensors")
    )
    assert last.layers.keys() == both.layers.keys()
    assert find_adapter(str(run)) == run / "adapter" / "pytorch_lora_weights.safetensors"
    card = (run / "adapter" / "README.md").read_text()
    assert "It continues `brought.safetensors`" in card
    out = done(capsys, "plan", tiny_config, *own)
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    assert "policy.adapter" in refused(capsys, "resume", run, "trainer.iterations=3")


def saved(file, tensors, header=None):
    save_file(tensors, file, metadata=header)
    return file


def ones(*names):
    return {name: torch.ones(2, 2) for name in names}


def other_model(file):
    random_adapter(tiny_pipeline("ZImagePipeline").transformer, ENDS).write(file, PREFIX)


def wider(file):
    layers = random_adapter(transformer(), ENDS).layers
    Adapter({name: (torch.ones(3, 7), up) for name, (_, up) in layers.items()}).write(file, PREFIX)


DORA = ("x.lora_A.weight", "x.lora_B.weight", "x.dora_scale")
REFUSED = {
    "missing": (lambda file: None, "there is no such file or folder"),
    "another model's": (other_model, "does not fit this FluxTransformer2DModel"),
    "other widths": (wider, "have another shape, such as single_transformer_blocks.0.attn.to_k"),
    "a merged model": (
        lambda file: saved(file, ones("transformer_blocks.0.attn.to_q.weight")),
        "a merged model is no adapter",
    ),
    "DoRA": (lambda file: saved(file, ones(*DORA)), "is a DoRA"),
    "no safetensors": (lambda file: file.write_bytes(b"no"), "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_adapter_of_the_model_is_said_in_one_message(
    case, tiny_config, tmp_path, capsys
):
    make, message = REFUSED[case]
    make(tmp_path / "x.safetensors")
    err = refused(capsys, "train", tiny_config, f"policy.adapter={tmp_path}/x.safetensors")
    assert message in err and f"{tmp_path}/x.safetensors" in err
    assert not (tmp_path / "runs").exists()


CONTRADICTIONS = [
    ("adapter=brought.safetensors", "policy.lora_rank=2: the adapter", "has 3; take it out"),
    ("adapter=brought.safetensors lora_rank=3 lora_targets=[to_q]", "policy.lora_targets="),
    ("adapter=x.bin", "a pickle could run code"),
    ("adapter=pickles", "holds pickles only"),
    ("adapter=run", "is a run without an adapter"),
    ("adapter=someone/theirs", "is no file or folder here, and is not in the local hub cache"),
]


@pytest.mark.parametrize(("given", "words"), [(given, words) for given, *words in CONTRADICTIONS])
def test_settings_that_contradict_an_adapter_are_refused(
    tiny_config, file, tmp_path, capsys, monkeypatch, given, words
):
    for place in ("x.bin", "pickles/x.bin", "run/x.bin", "run/config.yaml"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    options = [f"policy.{option}" for option in given.split()]
    said = refused(capsys, "train", tiny_config, *options)
    assert all(word in said for word in words)


def is_same(one, other):
    """Equal to the bit."""
    pairs = [(one.layers[module], other.layers[module]) for module in other.layers]
    return one.layers.keys() == other.layers.keys() and all(
        torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True)
    )


def as_written(config, **changes):
    """What peft writes of a config."""
    plain = {**config.to_dict(), **changes}
    return {key: sorted(each) if isinstance(each, set) else each for key, each in plain.items()}


AS_TRAINED = {
    "alpha": {},
    "rsLoRA": {"use_rslora": True},
    "ranks and alphas by module": {
        "rank_pattern": {"to_q": 2, "attn.to_k": 4},
        "alpha_pattern": {"to_v": 1.5, "to_q": 5},
    },
    "an ending in an expression": {"alpha_pattern": {r"transformer_blocks\.0\.attn\.to_q": 2.5}},
    "other initial values": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("how", AS_TRAINED)
def test_the_change_of_weights_is_that_of_peft_whoever_wrote_the_file(tmp_path, how):
    """By diffusers' models, whose header has names without a prefix; by peft; and its weights with
    a model's own names. Products of float32 in another order."""
    trained = flux_pipeline().transformer
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ENDS, **AS_TRAINED[how]})
    # peft's orthogonal values need an even rank
    config.r = 3 if config.init_lora_weights is True else 4
    trained.add_adapter(config)
    modules = trained.named_modules()
    layers = {name: module for name, module in modules if hasattr(module, "lora_A")}
    for number, layer in enumerate(layers.values()):
        for value in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
            torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(number))
    trained.save_lora_adapter(tmp_path / "diffusers", weight_name="x.safetensors")
    tensors = load_file(tmp_path / "diffusers/x.safetensors")
    for name, prefix in (("peft", "base_model.model."), ("own names", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(as_written(config)))
        prefixed = {prefix + key: value for key, value in tensors.items()}
        saved(tmp_path / name / "adapter_model.safetensors", prefixed)
    for file in tmp_path.glob("*/*.safetensors"):
        found = read(file)
        assert found.layers.keys() == layers.keys()
        for name, layer in layers.items():
            delta = layer.get_delta_weight("default").detach()
            # sums of four products, or of eight where initial values are taken off
            close = rounding(32, size=delta.abs().max())
            torch.testing.assert_close(found.delta(name), delta, **close)
        # what is in the weights is in no header any more
        found.write(tmp_path / "again.safetensors", PREFIX)
        assert is_same(read_adapter(tmp_path / "again.safetensors"), found)


def peft_header(prefix="transformer.", r=3, lora_alpha=3, **more):
    config = {"r": r, "lora_alpha": lora_alpha, **more}
    named = {f"{prefix}{key}": value for key, value in config.items()}
    return {"lora_adapter_metadata": json.dumps(named)}


HEADERS = [
    (peft_header(use_dora=True), "use_dora, which is not supported"),
    (peft_header(bias="all"), "bias, which is not supported"),
    (peft_header(rank_pattern={"to_q": 8}), "has rank 3, but r=8"),
    (peft_header(alpha_pattern={"(a+)+": 1}), "is a regular expression; only names of modules"),
    (peft_header(rank_pattern={".*to_(q|k)": 3}), "is a regular expression; only names of modules"),
    (peft_header(PREFIX, lora_alpha=1e300), ""),
    *(({"lora_adapter_metadata": text}, "") for text in ("[1]", "{")),
    *(
        ({"g2rpo.lora_alpha": alpha, "ss_network_dim": rank}, "")
        for alpha, rank in (("nan", "3"), ("1e300", "3"), ("-1", "3"), ("3", "0"))
    ),
    *(({"g2rpo.lora_above": above}, "") for above in ("1.5", "x")),
]


@pytest.mark.parametrize(("header", "message"), HEADERS, ids=str)
def test_a_header_of_another_kind_or_with_impossible_values_is_refused(
    file, tmp_path, header, message
):
    saved(tmp_path / "odd.safetensors", load_file(file), header)
    with pytest.raises(UserError, match=f"odd.safetensors: .*{message}"):
        read_adapter(tmp_path / "odd.safetensors", FluxPipeline)


INITIAL = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "eva", "lora_ga", "mica")
NOT_DEFAULT = {"init_lora_weights": INITIAL, "bias": ("all", "lora_only"), "peft_type": ("LOHA",)}
SETTINGS = {field.name for field in dataclasses.fields(LoraConfig)} - PeftConfig.model_fields.keys()
JUDGED = sorted(name for name in SETTINGS if HARMLESS.get(name, ()) is not None)
CHANGED = [(name, value) for name in JUDGED for value in NOT_DEFAULT.get(name, [{"x": 1}, True])]


def changed_config(folder, **changes):
    beside = folder / "adapter_config.json"
    beside.write_text(json.dumps({**json.loads(beside.read_text()), **changes}))


@pytest.mark.parametrize(("name", "value"), [*CHANGED, ("of_a_later_peft", 1)])
def test_a_setting_of_peft_that_is_not_known_to_be_harmless_is_refused_by_name(
    brought, tmp_path, name, value
):
    """Every field of the installed LoraConfig but those that are used, or listed as harmless."""
    file = as_peft(brought, tmp_path)
    changed_config(tmp_path, **{name: value})
    with pytest.raises(UserError, match=f"adapter_config.json: has {name}, which is not supported"):
        read(file)


PLAIN = [
    ("init_lora_weights", "gaussian"),
    ("init_lora_weights", False),
    ("peft_type", "LORA"),
    ("of_later", None),
]


def test_what_peft_writes_of_a_plain_lora_is_read(brought, tmp_path):
    file = as_peft(brought, tmp_path)
    more = {"exclude_modules": ["x"], "lora_dropout": 0.1, "inference_mode": True}
    config = LoraConfig(r=3, lora_alpha=6, target_modules=ENDS, **more)
    for name, value in PLAIN:
        changed_config(tmp_path, **as_written(config, **{name: value}))
        found = read(file)
        assert found.scale == 2.0 and is_same(found, brought)


CONFIGS = [
    ({"r": 4}, "r=4 in the config"),
    ({"lora_alpha": 0}, "lora_alpha: Input"),
    ({"lora_alpha": float("nan")}, "lora_alpha: Input"),
    ({"r": None}, "r: Input"),
    (None, "adapter_config.json; put"),
]


@pytest.mark.parametrize("kind", few([KIND, *QUICK], KIND.__eq__))
@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=str)
def test_a_file_of_peft_needs_its_config(tmp_path, kind, changes, message):
    pipeline = tiny_pipeline(kind)
    file = as_peft(random_adapter(pipeline.transformer, ENDS), tmp_path)
    if changes is None:
        (tmp_path / "adapter_config.json").unlink()
    else:
        changed_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        read_adapter(file, type(pipeline), pipeline.transformer)


def kohya(prefix):
    ends = {DOWN: ".lora_down.weight", UP: ".lora_up.weight"}
    return lambda module, end: prefix + module.replace(".", "_") + ends[end]


def plain(prefix):
    return lambda module, end: prefix + module + end


PREFIXES = (
    *("", "transformer.", "diffusion_model.", "model.diffusion_model.", "unet.", "module."),
    *("_orig_mod.", "module._orig_mod.", "transformer._fsdp_wrapped_module."),
    "transformer.module.",
)
WRAPPED = ".0._fsdp_wrapped_module._checkpoint_wrapped_module."
OLD = {DOWN: ".lora.down.weight", UP: ".lora.up.weight"}
WRITTEN = {
    **{prefix: plain(prefix) for prefix in PREFIXES},
    **{prefix: kohya(prefix) for prefix in ("lora_transformer_", "lora_unet_", "lycoris_")},
    "default": lambda module, end: f"{PREFIX}{module}{end.replace('.weight', '.default.weight')}",
    "no weight": lambda module, end: f"{PREFIX}{module}{end.removesuffix('.weight')}",
    "old diffusers": lambda module, end: f"{module}{OLD[end]}",
    "inside": lambda module, end: f"{PREFIX}{module.replace('.0.', WRAPPED)}{end}",
}
FAMILIES = (KIND, "QwenImagePipeline", "WanPipeline", *QUICK)


@pytest.mark.parametrize("kind", few(FAMILIES, KIND.__eq__))
def test_names_are_the_models_whatever_trainers_and_wrappers_put_around_them(kind, tmp_path):
    pipeline, file = tiny_pipeline(kind), tmp_path / "x.safetensors"
    adapter = random_adapter(pipeline.transformer, ENDS)
    for how, name in WRITTEN.items():
        tensors = {}
        for module, (down, up) in adapter.layers.items():
            tensors |= {name(module, DOWN): down, name(module, UP): up}
        saved(file, tensors)
        assert is_same(read_adapter(file, type(pipeline), pipeline.transformer), adapter), how
        saved(file, {f"weird.{key}": value for key, value in tensors.items()})
        with pytest.raises(UserError, match=r"(?s)such as weird.*The model has |leaves out"):
            read_adapter(file, type(pipeline), pipeline.transformer)


OF_A_MODULE = [
    (".diff", "whole weights"),
    (".diff_b", "whole weights"),
    (".lora_B.bias", "biases"),
    (".oft", "other tensors"),
    (".oft_R.weight", "OFT"),
    (".lokr_w1", "LoKr"),
    (".hada_w1_a", "LoHa"),
    (".dora_scale", "DoRA"),
    (".lora_A.scale_weight", "in fewer bits"),
    (".comfy_quant", "in fewer bits"),
]
OF_OTHER_PARTS = (
    *("lora_te1_text_model.x", "text_encoder_2.x", "clip_l.x", "t5xxl.x", "umt5xxl.x"),
    *("qwen25_7b.x", "vae.decoder.x"),
)


def test_what_an_adapter_of_the_transformer_alone_would_leave_out_is_refused(brought, tmp_path):
    """Beside sound factors, whose names hold "diff": of a module, or of other parts."""
    ours, module = brought.tensors("model.diffusion_model."), next(iter(brought.layers))
    cases = [
        ({f"model.diffusion_model.{module}{end}": torch.ones(2)}, kind) for end, kind in OF_A_MODULE
    ]
    for part in OF_OTHER_PARTS:
        beside = {f"{part}{DOWN}": torch.ones(3, 8), f"{part}{UP}": torch.ones(8, 3)}
        cases.append((beside, f"changes text encoders or a VAE too .2 of .*such as {part}"))
    for beside, message in cases:
        with pytest.raises(UserError, match=message):
            read(saved(tmp_path / "x.safetensors", ours | beside))


def test_prefixes_may_differ_and_of_several_adapters_none_is_chosen(brought, tmp_path):
    ours, file = brought.tensors(PREFIX), tmp_path / "x.safetensors"

    def renamed(old, new):
        return {name.replace(old, new): value.clone() for name, value in ours.items()}

    layers = list(brought.layers.items())
    mixed = Adapter(dict(layers[:2])).tensors("diffusion_model.")
    mixed |= Adapter(dict(layers[2:])).tensors(PREFIX)
    assert is_same(read(saved(file, mixed)), brought)
    for tensors, said in (
        (renamed(".weight", ".a.weight") | renamed(".weight", ".b.weight"), "adapters, a, b"),
        (ours | renamed(PREFIX, f"{PREFIX}_orig_mod."), "twice"),
        (ours | renamed(PREFIX, "unet."), "two adapters of"),
    ):
        with pytest.raises(UserError, match=said):
            read(saved(file, tensors))


def factors(name, rows, width=8):
    """Of kohya's names, or of plain ones."""
    ends = (".lora_down.weight", ".lora_up.weight") if name.startswith("lora_") else (DOWN, UP)
    return {name + ends[0]: torch.ones(2, width), name + ends[1]: torch.ones(rows, 2)}


def test_what_diffusers_would_leave_out_or_cannot_divide_is_named(tmp_path):
    sound = tensors_for(flux_of_real_width(), SPECS[KIND].comfyui, "kohya")
    for kind, tensors, said in (
        (KIND, sound | factors("lora_unet_odd", 8), "in no format.*lora_unet_odd"),
        (QUICK[0], factors("layers.0.attention.qkv", 90, 32), r"qkv: has 90 rows, but .* have 96"),
    ):
        model = tiny_pipeline(kind).transformer if kind in QUICK else None
        with pytest.raises(UserError, match=said):
            read_adapter(
                saved(tmp_path / "x.safetensors", tensors), getattr(diffusers, kind), model
            )


class Weights(dict):
    """A checkpoint whose other tensors are 0, in as many rows as diffusers' converters divide."""

    def pop(self, name, *default):
        return super().pop(name, torch.zeros(7 * D if "linear1" in name else 6, 1))


def flux1():
    with torch.device("meta"):
        return FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)


def tiny(kind):
    return lambda: tiny_pipeline(kind).transformer


D, SD3, ZERO, ONE = 3072, "StableDiffusion3Pipeline", "joint_blocks.0.", "joint_blocks.1."
ORIGINAL = {  # a model, and rows by names of its original weights
    KIND: (
        *(flux1, single_file_utils.convert_flux_transformer_checkpoint_to_diffusers),
        {"double_blocks.0.img_attn.qkv": 3 * D, "double_blocks.0.txt_attn.qkv": 3 * D}
        | {"double_blocks.0.txt_attn.proj": D, "double_blocks.0.txt_mlp.0": 4 * D}
        | {"double_blocks.0.img_mod.lin": 6 * D, "single_blocks.0.modulation.lin": 3 * D}
        | {"single_blocks.0.linear1": 7 * D, "single_blocks.0.linear2": D, "img_in": D}
        | {"txt_in": D, "time_in.out_layer": D, "vector_in.in_layer": D}
        | {"guidance_in.in_layer": D, "final_layer.linear": 64}
        | {"final_layer.adaLN_modulation.1": 2 * D},
    ),
    SD3: (
        *(tiny(SD3), single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers),
        {f"{ZERO}x_block.attn.qkv": 96, f"{ZERO}context_block.attn.qkv": 96}
        | {f"{ZERO}x_block.attn2.qkv": 96, f"{ZERO}x_block.attn2.proj": 32}
        | {f"{ZERO}context_block.attn.proj": 32, f"{ONE}x_block.attn.proj": 32}
        | {f"{ONE}x_block.mlp.fc1": 128, f"{ZERO}context_block.mlp.fc2": 32}
        | {f"{ZERO}x_block.adaLN_modulation.1": 288, f"{ZERO}context_block.adaLN_modulation.1": 192}
        | {f"{ONE}context_block.adaLN_modulation.1": 64, "context_embedder": 32}
        | {"t_embedder.mlp.0": 32, "y_embedder.mlp.2": 32}
        | {"final_layer.linear": 16, "final_layer.adaLN_modulation.1": 64},
    ),
    "ZImagePipeline": (
        tiny("ZImagePipeline"),
        single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
        {
            "layers.1.attention.qkv": 96,
            "layers.9.attention.qkv": 96,
            "noise_refiner.0.attention.out": 32,
        }
        | {"layers.1.feed_forward.w1": 85, "x_embedder": 32, "final_layer.linear": 16},
    ),
    "LTXPipeline": (
        *(tiny("LTXPipeline"), single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers),
        {"patchify_proj": 32, "adaln_single.linear": 192, "transformer_blocks.0.attn1.to_q": 32},
    ),
    "WanPipeline": (
        *(tiny("WanPipeline"), single_file_utils.convert_wan_transformer_to_diffusers),
        {"blocks.1.cross_attn.q": 24, "blocks.1.ffn.2": 24, "time_embedding.2": 24}
        | {"time_projection.1": 144, "head.head": 16, "blocks.7.self_attn.o": 24},
    ),
}


@pytest.mark.parametrize("kind", ORIGINAL)
def test_original_names_are_read_as_diffusers_converts_the_original_weights(kind, tmp_path):
    """It reads no LoRA with these: with lora_A, of single modules, or at all. The models of plans
    have fewer blocks than the file."""
    build, converted, rows = ORIGINAL[kind]
    model, draw = build(), torch.Generator().manual_seed(0)
    ups = {name: torch.randn(count, 2, generator=draw) for name, count in rows.items()}
    theirs = converted(Weights({f"{name}.weight": up for name, up in ups.items()}))
    expected = {name.removesuffix(".weight"): up for name, up in theirs.items() if up.any()}
    assert len(expected) >= len(rows)
    for write in (plain("diffusion_model."), plain("base_model.model."), kohya("lora_unet_")):
        tensors = {}
        for name, up in ups.items():
            tensors |= {write(name, DOWN): torch.ones(2, 3), write(name, UP): up}
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
        file = saved(tmp_path / "x.safetensors", tensors)
        found = read_adapter(file, getattr(diffusers, kind), model).layers
        assert found.keys() == expected.keys()
        assert all(torch.equal(up, expected[name]) for name, (_, up) in found.items())
        assert all(torch.equal(down, torch.ones(2, 3)) for down, _ in found.values())


IN, OUT = torch.ones(2, 8), torch.ones(8, 2)
KERNELS = torch.ones(2, 8, 3, 3), torch.ones(8, 2, 3, 3)
NO_ADAPTER = {
    "NaN": (IN * float("nan"), OUT),
    "infinite": (IN, OUT / 0),
    "beyond float32": (IN.double() * 1e300, OUT),
    "rank 0": (torch.ones(0, 8), torch.ones(8, 0)),
    "no size": (torch.tensor(1.0), OUT),
    "a vector": (IN[0], OUT),
    "of two ranks": (IN, torch.ones(8, 3)),
    "4-d up alone": (IN, OUT[..., None, None]),
    "a kernel in up": KERNELS,
    "whole numbers": (IN.to(torch.int8), OUT),
    **{
        f"alpha {value}": (IN, OUT, torch.tensor(value))
        for value in (float("nan"), float("inf"), -2.0, 0.0, 1e-45)
    },
    "alpha beyond float32": (IN, OUT, torch.tensor(1e300, dtype=torch.float64)),
    "alpha that overflows": (IN, OUT * 1e30, torch.tensor(1e30)),
    "two alphas": (IN, OUT, torch.ones(2)),
}


@pytest.mark.parametrize("case", NO_ADAPTER)
def test_what_is_no_finite_change_of_weights_is_refused_where_it_is_read(case, tmp_path):
    names = (f"{PREFIX}m{DOWN}", f"{PREFIX}m{UP}", f"{PREFIX}m.alpha")
    saved(tmp_path / "x.safetensors", dict(zip(names, NO_ADAPTER[case], strict=False)))
    with pytest.raises(UserError, match=r"x.safetensors: transformer.m\."):
        read_adapter(tmp_path / "x.safetensors", FluxPipeline)
    down, up, *alpha = NO_ADAPTER[case]
    if not alpha and down.is_floating_point():
        with pytest.raises(ValueError, match="m: "):
            Adapter({"m": (down.float(), up.float())})


def test_factors_of_every_floating_point_type_are_read_exactly(brought, tmp_path):
    for dtype in FLOATS:
        small = {name: value.to(dtype) for name, value in brought.tensors(PREFIX).items()}
        found = read(saved(tmp_path / "x.safetensors", small)).tensors(PREFIX)
        assert all(torch.equal(found[name], value.float()) for name, value in small.items()), dtype


def test_a_pointer_in_the_place_of_an_adapter_is_named(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for use in (read, policy_of(KIND, flux_pipeline()).load):
        with pytest.raises(UserError, match=r"is a pointer of git-lfs, .*`git lfs pull`"):
            use(file)
