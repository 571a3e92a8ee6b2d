"""The manual: what holds without building it. `make docs` builds it, with warnings as errors."""

import copy
import importlib.util
import inspect
import pkgutil
import re
from itertools import pairwise
from operator import le
from pathlib import Path

import pytest
import yaml

import posenc
from posenc.lab import show
from posenc.lab.comparison import report as comparison
from posenc.lab.comparison.plan import Plan
from posenc.lab.comparison.run import Run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([\w-]+))?\)")
REFERENCE = re.compile(r"\]\[(posenc[\w.]*)\]|^::: (posenc[\w.]*)", re.MULTILINE)


def hook(name):
    """A hook of the build, which is not in a package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measured, pictures, formulas = map(hook, ("measured", "pictures", "formulas"))
record_pages = measured.record_pages
tournament = hook("tournament")
signatures = hook("signatures")
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_imports_what_is_public(page):
    """What a reader copies must not come from a room that may change at any time."""
    private = re.compile(r"(from|import) posenc\.(numerics|ops|lab|_contract|cli)\b")
    assert not private.search((DOCS / page).read_text())


def listed(nav):
    for entry in nav:
        (target,) = entry.values()
        yield from listed(target) if isinstance(target, list) else [target]


def headings(page):
    found = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in found]
    return {re.sub(r"\s+", "-", each) for each in words}


def test_the_navigation_has_every_page_once():
    """A page that nobody can reach, and an entry that leads nowhere, are both lost."""
    in_nav = list(listed(SETTINGS["nav"]))

    assert len(set(in_nav)) == len(in_nav)
    assert set(in_nav) == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """To a page and a heading of it, a picture that the build draws, or a file."""
    for target, anchor in LINK.findall((DOCS / page).read_text()):
        where = (DOCS / page).parent / target if target else DOCS / page
        inside = where.resolve().relative_to(DOCS).as_posix()
        if inside.startswith("pictures/"):
            assert inside in {f"pictures/{name}.svg" for name in pictures.PICTURES}
        else:
            assert where.is_file(), target
            assert not anchor or anchor in headings(inside), f"{target}#{anchor}"


# The words that a user of another library searches the manual for, and the page that has them.
SEARCHED = {
    "transformers": "LlamaRotaryEmbedding apply_rotary_pos_emb rotate_half inv_freq rope_scaling "
    "rope_parameters ROPE_INIT_FUNCTIONS unsqueeze_dim partial_rotary_factor build_alibi_tensor "
    "apply_multidimensional_rope",
    "flash-attn": "flash_attn RotaryEmbedding apply_rotary_emb apply_rotary_emb_qkv_ cu_seqlens "
    "apply_rotary_emb_kv_ seqlen_offset scale_base alibi_slopes flash_attn_with_kvcache "
    "pos_idx_in_fp32 softcap seqlen_offsets conjugate",
    "torchtune-torchtitan": "RotaryPositionalEmbeddings Llama3ScaledRoPE input_pos freqs_cis "
    "precompute_freqs_cis apply_rotary_emb ComplexRoPE CosSinRoPE VisionRotaryPositionalEmbeddings "
    "MRoPE.Config(mrope_section rope_cache _build_mrope_positions",
    "x-transformers": "rotary_pos_emb rotary_emb_dim AlibiPositionalBias DynamicPositionBias "
    "RelativePositionBias DataDependentAlibi PolarEmbedding RotaryEmbedding(use_xpos=True) "
    "ScaledSinusoidalEmbedding AbsolutePositionalEmbedding apply_rotary_pos_emb CoPE num_mem_kv "
    "rel_pos_num_buckets rotary_xpos_scale_base",
    "rotary-embedding-torch": "lucidrains rotate_queries_or_keys rotate_queries_with_cached_keys "
    "rotate_queries_and_keys get_axial_freqs RotaryEmbedding(use_xpos=True) use_xpos "
    "apply_learned_rotations freqs_for custom_freqs learned_freq "
    "seq_before_head_dim apply_rotary_emb cache_if_possible xpos_scale_base",
    "timm": "RotaryEmbeddingCat apply_rot_embed_cat apply_rot_embed build_rotary_pos_embed "
    "build_sincos2d_pos_embed build_fourier_pos_embed RotaryEmbeddingMixed RotaryEmbeddingMRope "
    "RotaryEmbeddingDinoV3 resample_abs_pos_embed RelPosBias FourierEmbed ref_feat_shape",
    "diffusers": "FluxPosEmbed get_1d_rotary_pos_embed get_2d_rotary_pos_embed freqs_cis img_ids "
    "get_3d_rotary_pos_embed apply_rotary_emb Timesteps get_timestep_embedding txt_ids "
    "get_2d_sincos_pos_embed get_3d_sincos_pos_embed GaussianFourierProjection "
    "apply_rotary_emb_allegro",
    "megatron-transformer-engine": "RotaryPositionEmbedding fused_apply_rotary_pos_emb "
    "fused_apply_rotary_pos_emb_thd apply_rotary_pos_emb YarnRotaryEmbedding start_positions "
    "MultimodalRotaryEmbedding get_pos_emb_on_this_cp_rank rotary_percent tensor_format freqs "
    "fused_apply_rotary_pos_emb_2d fused_apply_rotary_pos_emb_cached apex",
    "vllm": "get_rope MRotaryEmbedding is_neox_style cos_sin_cache YaRNScalingRotaryEmbedding "
    "Llama3RotaryEmbedding Phi3LongRoPEScaledRotaryEmbedding mrope_section rope_parameters "
    "kv_cache_dtype reshape_and_cache_flash fused_qk_norm_rope concat_and_cache_mla rms_norm",
    "sglang": "get_rope is_neox_style rope_scaling MRotaryEmbedding FusedSetKVBufferArg "
    "apply_rope_with_cos_sin_cache_inplace fused_qk_norm_rope get_rope_index cos_sin_cache",
    "flashinfer": "apply_rope apply_rope_inplace apply_rope_pos_ids apply_llama31_rope indptr "
    "offsets apply_rope_with_cos_sin_cache append_paged_kv_cache get_batch_indices_positions "
    "rope_scale rope_theta pos_encoding_mode append_paged_mla_kv_cache kv_indptr",
    "flash-linear-attention": "FLA fla.modules.RotaryEmbedding seqlen_offset cu_seqlens "
    "rotary_embedding max_seqlen parallel_forgetting_attn conjugate chunk_indices",
    "liger": "liger_rotary_pos_emb apply_liger_kernel_to_llama liger_multimodal_rotary_pos_emb "
    "liger_llama4_text_rotary_pos_emb use_liger_kernel LigerRMSNorm",
    "quack": "quack.rotary apply_rotary_emb apply_rotary_emb_qkv_ apply_rotary_emb_kv_ conjugate "
    "seqlen_offsets cu_seqlens rope_posfreq_epi make_interleaved_inv_freq",
    "xformers": "rope_padded adjacents linear_scale use_dynamic_scaling first_seqpos "
    "BlockDiagonalCausalWithOffsetPaddedKeysMask LowerTriangularMaskWithTensorBias "
    "memory_efficient_attention",
    "mlx": "mlx.nn.RoPE nn.RoPE mx.fast.rope traditional freqs nn.ALiBi initialize_rope "
    "nn.SinusoidalPositionalEncoding SuScaledRoPE YarnRoPE",
    "keras-hub": "keras_hub.layers.RotaryEmbedding RotaryEmbedding(max_wavelength start_index "
    "SinePositionEncoding PositionEmbedding TokenAndPositionEmbedding scaling_factor rope_type "
    "AlibiBias",
    "longrope-yarn": "LlamaYaRNScaledRotaryEmbedding LongRoPEScaledRotaryEmbedding rescale_factors "
    "LlamaDynamicYaRNScaledRotaryEmbedding LlamaNTKScaledRotaryEmbedding attn_factor ReRoPE",
    "lucid-lightwatch": "lucid.nn lightwatch::nn RotaryPosEmbedding SinusoidalPE",
}


@pytest.mark.parametrize("page", SEARCHED)
def test_the_words_of_another_library_are_on_its_page(page):
    """The search splits text at spaces, drops signs at the front, and matches beginnings."""
    text = (DOCS / "coming-from" / f"{page}.md").read_text()
    found = [re.sub(r"^\W+", "", each) for each in text.split()]
    missing = [w for w in SEARCHED[page].split() if not any(each.startswith(w) for each in found)]
    assert missing == []


def test_every_other_library_is_in_the_list_of_its_section():
    pages = {Path(page).stem for page in PAGES if page.startswith("coming-from/")} - {"index"}
    links = LINK.findall((DOCS / "coming-from" / "index.md").read_text())
    assert pages == set(SEARCHED)
    assert pages <= {Path(target).stem for target, _ in links}


@pytest.mark.parametrize("page", PAGES)
def test_every_name_in_the_manual_exists(page):
    """References become links to the API, and ``:::`` becomes its pages."""
    for pair in REFERENCE.findall((DOCS / page).read_text()):
        pkgutil.resolve_name("".join(pair))


def test_every_public_class_and_function_has_one_entry_in_the_reference():
    """On the page of its family; a second one would make every link to it ambiguous."""
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    names = [name for name in posenc.__all__ if callable(getattr(posenc, name))]
    assert [name for name in names if text.count(f"::: posenc.{name}\n") != 1] == []


PATH = [f"start/{page}.md" for page in "install five-lines nanogpt checkpoint decoding".split()]


@pytest.mark.parametrize(("page", "following"), list(pairwise(PATH)))
def test_a_page_of_the_path_ends_with_a_link_to_the_next(page, following):
    last = (DOCS / page).read_text().rstrip().splitlines()[-1]
    assert re.fullmatch(rf"Next: \[.+\]\({Path(following).name}\)\.", last)


def test_the_path_is_the_first_section_in_its_order():
    first = list(listed(SETTINGS["nav"][:1]))
    assert first == ["index.md", *PATH]
    links = [target for target, _ in LINK.findall((DOCS / "index.md").read_text())]
    assert [target for target in links if target in PATH][: len(PATH)] == PATH


def test_every_picture_of_a_page_is_drawn_and_every_drawing_shown():
    """A drawing that no page has costs every build its time."""
    shown = {
        Path(target).stem
        for page in PAGES
        for target, _ in LINK.findall((DOCS / page).read_text())
        if "pictures/" in target
    }

    assert shown == set(pictures.PICTURES)


@pytest.fixture
def report():
    """One file of results, its numbers replaced by ones that are found nowhere else."""
    found = copy.deepcopy(measured.reports())
    name = "neoverse-n1-fp32-2t"
    for measurement in found[name]["measurements"]:
        for result in measurement["results"]:
            if result["status"] == "timed":
                result["ratio"] = 7.25
            if result["error_ulps"] is not None:
                result["error_ulps"] = 3.75
    return {name: found[name]}


def numbers(page):
    cells = [cell for line in page.splitlines() if line[:1] == "|" for cell in line.split("|")]
    return {cell.strip() for cell in cells if re.fullmatch(r" *[\d.]+ *", cell)}


def test_times_come_from_the_results(report):
    """Change the file and every number of the table has changed: none is typed."""
    assert numbers(measured.speed(report)) == {"7.25"}


def test_errors_come_from_the_results(report):
    """The same, for errors."""
    assert numbers(measured.accuracy(report)) == {"3.75"}


def test_tables_are_what_the_record_says():
    """Change a file and the table changes; a page has the table that its file gives."""
    record = record_pages.Record()
    for name in record_pages.PAGES:
        text = (DOCS.parent / name).read_text()
        assert record_pages.MARKS.search(text), name
        assert record_pages.fill(text, record) == text, (
            f"python benchmarks/record.py --pages: {name}"
        )
    terms = record.results("terms")
    for row in terms:
        row["posenc"] = row["unbiased"] = row["matrix"] = 7.25
    lines = record_pages.costs(record).splitlines()
    cells = {cell.strip() for line in lines[2:-2] for cell in line.split("|")[2:-1]}
    assert cells == {"7.2", ""}


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("measured/")])
def test_pages_of_numbers_have_marks_and_no_numbers_of_their_own(page):
    """A mark that no text replaces would be an empty page."""
    text = (DOCS / page).read_text()

    assert "<!--" in text
    assert not numbers(text)
    assert numbers(measured.fill(text))
    assert "<!--" not in measured.fill(text)


def test_the_tournament_is_written_from_its_results_or_says_how_to_make_them(tmp_path):
    """Every score, rank and cost of the file is on the page, and no other."""
    page = (DOCS / "tournament.md").read_text()
    assert "No numbers are in" in tournament.fill(page, tmp_path)

    sizes = {"train_length": 8, "steps": 2, "batch": 2, "width": 16, "layers": 1, "windows": 2}
    plan = Plan(encodings=("none", "rope-yarn"), tasks=("copy", "index"), seeds=2, **sizes)
    run = Run(tmp_path, plan)
    run.begin()
    run.go()
    written = tournament.fill(page, tmp_path)

    assert "<!--" not in written
    for rows in run.results["summary"].values():
        for row in rows:
            cells = [
                line.replace("**", "")
                for line in written.splitlines()
                if line.startswith(f"| {row['label']} |")
            ]
            assert any(all(score in cell for score in comparison.scores(row)) for cell in cells)
    assert "applied to RoPE&#x27;s model" in written
    assert f"| {comparison.costs(run.results['costs']['none'])[1]} |" in written


# What the page says in words: at this length, each encoding is better than the next one.
ORDER = [
    ("text", (1,), "rope pope"),
    ("text", (2, 4, 8), "rope-yarn pope rope"),
    ("index", (1,), "rope pope"),
    ("index", (2, 4, 8), "rope-yarn pope rope"),
    ("text", (8,), "kerple sandwich alibi"),
    ("copy", (8,), "kerple alibi"),
    ("text", (2, 4, 8), "kerple alibi fire"),
    ("text", (2, 4), "t5 fire"),
    ("text", (8,), "fire t5"),
    ("copy", (8,), "alibi none learned rope"),
    ("text", (1, 2, 4, 8), "alibi none"),
    ("index", (2, 4, 8), "rope-nope rope"),
    ("text", (2, 4), "rope-ntk rope-yarn rope-linear"),
    ("text", (8,), "rope-yarn rope-ntk"),
    ("index", (2, 4, 8), "rope-yarn rope-ntk"),
    ("text", (8,), "drope rope-yarn rope"),
    ("copy", (2,), "cope rope-half"),
]


@pytest.mark.parametrize(("task", "at", "names"), ORDER)
def test_what_the_tournament_says_is_so(task, at, names):
    """A run that contradicts the page must change it."""
    plan, found = tournament.results()
    rows = {row["encoding"]: row["score"] for row in found["summary"][task]}
    for times in at:
        here = plan.times.index(times)
        scores = [rows[name][here] for name in names.split()]
        assert scores == sorted(scores, reverse=task != "text")
        assert len(set(scores)) == len(scores)


@pytest.mark.parametrize("name", ["alibi", "xpos", "self-extend", "dual-chunk", "kerple"])
def test_what_the_tournament_says_of_losses_that_are_kept_is_so(name):
    """On the longest text they are nearer to the loss of the training length than to RoPE's."""
    _, found = tournament.results()
    rows = {row["encoding"]: row["score"] for row in found["summary"]["text"]}
    assert rows[name][-1] - rows[name][0] < 0.1 * (rows["rope"][-1] - rows["rope"][0])


@pytest.mark.parametrize("text", ["tales", "long"])
def test_what_the_tournament_says_of_the_large_models_is_so(text):
    """It names the small models' eight best; the same encodings keep their loss, except one."""
    plan, found = tournament.large(text)
    _, small = tournament.results()
    rows = {row["encoding"]: row["score"] for row in found["summary"]["text"]}
    best = sorted(small["summary"]["text"], key=lambda row: row["rank"][-1])[:8]
    worse = {name: score[-1] - score[0] for name, score in rows.items()}

    assert rows.keys() == {row["encoding"] for row in best} | {"rope", "rope-yarn"}
    assert min(rows, key=lambda name: rows[name][-1]) == "alibi"
    assert worse["self-extend"] < worse["rope-yarn"] < worse["rope"]
    assert worse["dual-chunk"] < worse["rope-yarn"]
    keep = {name for name, more in worse.items() if more < 0.1 * worse["rope"]}
    kept = {"alibi", "alibi-learned", "forget-gate", "kerple", "sandwich", "self-extend"}
    assert keep == kept | {"dual-chunk", "transformer-xl" if text == "tales" else "rope-yarn"}
    assert plan.lengths == [2048, 4096, 8192, 16384]
    assert all(found["costs"][name]["read"] < 0.7 for name in ("alibi", "alibi-learned"))


def test_the_manual_names_every_bias_that_can_be_drawn():
    page = (DOCS / "relative-biases.md").read_text()
    names = page.split("`posenc show t5` draws this; ")[1].split("\n\n")[0]
    missing = [name for name in show.BIASES.keys() - {"alibi", "t5"} if f"`{name}`" not in names]
    assert not missing, f"docs/relative-biases.md needs the names for `posenc show`: {missing}"


def test_what_the_guide_says_of_scores_is_so():
    """A tournament that contradicts the guide must change it."""
    plan, found = tournament.results()
    assert plan.times == (1, 2, 4, 8)
    assert f"26th of {len(found['costs'])} on text" in (DOCS / "index.md").read_text()
    rows = {(task, row["encoding"]): row for task, part in found["summary"].items() for row in part}
    score = {key: [round(each, 2) for each in row["score"]] for key, row in rows.items()}
    rank = {key: row["rank"] for key, row in rows.items()}

    # Not beyond the spread of the best.
    assert rows["text", "rope"]["level"][0]
    assert rows["copy", "rope"]["level"][0]
    assert rows["text", "sinusoidal"]["level"][0]
    assert (score["index", "rope-nope"][3], score["index", "rope"][3]) == (0.68, 0.1)
    assert all(map(le, score["text", "rope"], score["text", "rope-nope"]))
    assert rank["copy", "kerple"][1:] == rank["index", "sandwich"][1:] == [1, 1, 1]
    assert score["text", "forget-gate"][1] == score["text", "forget-gate"][3]
    assert rank["text", "t5"][0] == 1
    assert rank["text", "relative-keys"][0] == 2
    for task in ("copy", "index"):
        assert max(score[task, name][3] for name in ("xpos", "rope")) < 0.2
    for name in ("rope-learned", "string"):
        assert abs(rows["text", name]["score"][0] - rows["text", "rope"]["score"][0]) < 0.01
        assert score["text", name][1] > score["text", "rope"][1]
    assert (score["copy", "cope"][1], score["copy", "rope"][1]) == (0.83, 0.03)
    assert score["text", "sinusoidal"][1] > 4
    assert rank["text", "learned"][0] == 26
    assert (score["text", "none"][0], score["text", "rope"][0]) == (1.54, 1.1)
    for t5, table in zip(score["text", "t5"], score["text", "learned-bias"], strict=True):
        assert abs(t5 - table) < 0.1


@pytest.mark.parametrize("text", ["tales", "long"])
def test_what_the_guide_says_of_the_large_models_is_so(text):
    """The lowest loss, what longer texts cost, and the time to read them."""
    plan, found = tournament.large(text)
    rows = {row["encoding"]: row["score"] for row in found["summary"]["text"]}
    worse = {name: score[-1] - score[0] for name, score in rows.items()}
    reading = {name: round(cost["read"], 1) for name, cost in found["costs"].items()}

    assert len(rows) == 10
    assert plan.lengths[-1] == 16384 == 8 * plan.lengths[0]
    assert max(worse["self-extend"], worse["dual-chunk"]) < worse["rope"] / 10
    assert worse["rope-yarn"] < worse["rope"] / 9
    assert (reading["alibi"], reading["self-extend"], reading["dual-chunk"]) == (0.6, 1.7, 1.8)
    assert reading["rope-yarn"] == reading["rope"] == 1.0


def test_what_the_guide_says_of_times_and_models_is_so():
    """It repeats numbers of two other pages."""
    guide = (DOCS / "index.md").read_text()
    costs = (DOCS / "relative-biases.md").read_text().partition("## What each costs")[2]
    rows = [[cell.strip() for cell in line.split("|")] for line in costs.splitlines()]
    times = {row[1]: row[4] for row in rows if len(row) == 8}

    def milliseconds(of):
        (time,) = [time for name, time in times.items() if name.startswith(of)]
        return time

    for of in ("no encoding:", "RoPE", "`RelativeKeys", "`T5Bias", "`FIRE", "`CoPE"):
        assert milliseconds(of) in guide, of
    for of in ("`TransformerXLBias", "`DeBERTaBias"):
        assert abs(float(milliseconds(of)) - 35) <= 1
    patched = (DOCS / "models.md").read_text().partition(" folders are patched")[0].split("\n")[-1]
    assert f"[{patched}](models.md)" in guide


def test_every_file_of_results_is_shown():
    """A machine that was measured has its place."""
    found = measured.reports()
    files = list(measured.RESULTS.glob("*/rotation*.json"))

    assert len(found) == len(files) > 1
    assert re.findall(r"^## (.+)$", measured.speed(found), re.MULTILINE) == list(found)


def test_contestants_with_wrong_results_are_listed():
    """A contestant that is not timed must not vanish."""
    found = measured.reports()
    wrong = {
        result["contestant"]
        for report in found.values()
        for measurement in report["measurements"]
        for result in measurement["results"]
        if result["status"] == "wrong"
    }

    refused = measured.accuracy(found).partition("## Not timed")[2]

    assert wrong
    assert all(f"| {who} |" in refused for who in wrong)


def test_formulas_are_found_in_pages_and_docstrings():
    """A fence, a directive over several lines, and both ways of writing one in a line."""
    text = "a\n```math\nx\n```\nb $`y`$ :math:`z`\n\n.. math:: u,\n    v\n\nc ``$ ls``"
    found = []

    rest = formulas.translate(text, lambda tex, block: found.append((tex, block)) or "")

    assert [(tex.split(), block) for tex, block in found] == [
        (["x"], True),
        (["u,", "v"], True),
        (["y"], False),
        (["z"], False),
    ]
    assert rest.split() == ["a", "b", "c", "``$", "ls``"]


def test_the_manual_fetches_nothing_from_the_network():
    """No web fonts, no scripts of others."""
    assert SETTINGS["theme"]["font"] is False
    assert "offline" in SETTINGS["plugins"]
    assert "http" not in (ROOT / "mkdocs.yml").read_text()
    assert not [path for path in (DOCS / "assets").iterdir() if "http" in path.read_text()]


def test_the_page_of_signatures_has_every_public_name():
    page = (DOCS / "api" / "signatures.md").read_text()
    written = signatures.fill(page)
    assert "<!--" not in written
    for name in [n for n in posenc.__all__ if isinstance(getattr(posenc, n), type)]:
        assert f"\n{name}(" in written
    assert "\nPoPE(head_dim, *, num_kv_heads, max_seq_len=2048" in written


def test_public_arguments_have_no_names_of_other_libraries():
    """One word for a thing, in every signature."""
    theirs = {"theta", "rope_theta", "is_causal", "n_heads", "nheads", "max_position_embeddings"}
    theirs |= {
        "page",
        "pages",
        "slots",
        "input_pos",
        "cache_position",
        "attention_bias",
        "sliding_window",
    }
    for _, name, signature in signatures.signatures():
        assert not theirs & signature.parameters.keys(), name


def test_public_signatures_are_written_out():
    """Only what passes arguments on to a constructor may take keywords of any name."""
    for _, name, signature in signatures.signatures():
        passes_on = name.split(".")[-1] in ("replace", "from_config", "rope_layers")
        kinds = {p.kind for p in signature.parameters.values()}
        assert passes_on or inspect.Parameter.VAR_KEYWORD not in kinds, name
