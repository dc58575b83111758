"""One search over three kinds of index, on small corpora and on HotpotQA's real paragraphs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crrl_lib.encoders import LexicalProjection, tokens
from crrl_lib.records import Passage
from crrl_lib.retriever import build_index, corpus_checksum, load_index
from crrl_lib.sources import load_passages, load_questions

REAL = Path(__file__).resolve().parents[2] / "shared" / "data"
real = pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/data beside the repository")
ROOT = Path(__file__).resolve().parents[1]

CITIES = [
    Passage("g1", "Bonn", "Bonn is a city in Germany. It lies on the Rhine."),
    Passage("g2", "Köln", "Köln is a city in Germany with 1084831 inhabitants."),
    Passage("a1", "Linz", "Linz is a city in Austria. It lies on the Danube."),
    Passage("a2", "Melk", "Melk is a town in Austria. It lies on the Danube."),
    Passage("u1", "Victoria", "Victoria is a city in Texas."),
    Passage("u2", "Victoria", "Victoria is a city in Texas."),  # equal but for its id
    Passage("u3", "Victoria", "Victoria is a city in British Columbia, Canada."),
]
KINDS = [("lexical", {"dim": 512}), ("bm25", {})]


def ids(found: list[list[Passage]]) -> list[list[str]]:
    return [[p.id for p in top] for top in found]


@pytest.fixture(scope="module", params=KINDS, ids=[kind for kind, _ in KINDS])
def search(request, tmp_path_factory):
    kind, settings = request.param
    return build_index(CITIES, tmp_path_factory.mktemp(kind), kind, **settings)


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory):
    passages = load_passages(REAL / "hotpotqa_train_corpus.json")
    questions = load_questions(REAL / "hotpotqa_train.json", passages)
    folder = tmp_path_factory.mktemp("hotpot")
    return questions, {kind: build_index(passages, folder / kind, kind) for kind, _ in KINDS}


def test_tokens():
    assert tokens("Who is The Köln-Bonn's No. 7_b?") == ["koln", "bonn", "no", "7", "b"]
    assert tokens("Jose\u0301 \uff32ome stra\u00dfe") == ["jose", "rome", "strasse"]
    assert tokens("The ...") == []


def test_finds_by_title_text_and_number(search):
    queries = ["Bonn", "koln", "town on the Danube", "1084831", "Victoria in Canada"]
    assert [top[0] for top in ids(search(queries, 2))] == ["g1", "g2", "a2", "g2", "u3"]


def test_scores_fall_and_the_stored_passage_comes_back(search):
    (top,) = search(["city in Austria on the Danube"], 4)
    scores = [p.score for p in top]
    assert scores == sorted(scores, reverse=True)
    assert top[0].text == CITIES[2].text
    assert CITIES[2].score is None


def test_equal_scores_follow_corpus_order(search):
    assert ids(search(["Victoria Texas"], 2)) == [["u1", "u2"]]
    assert ids(search(["Victoria Texas"], 1)) == [["u1"]]


def test_a_query_without_a_known_term_gets_the_corpus_order(search):
    (top,) = search(["xyzzy"], 3)
    assert [p.id for p in top] == ["g1", "g2", "a1"]
    assert [p.score for p in top] == [0, 0, 0]
    assert ids(search(["the of"], 1)) == [["g1"]]


def test_edges(search):
    assert search([], 3) == []
    assert len(search(["Bonn"], 7)[0]) == 7
    assert len({p.id for p in search(["Bonn"], 7)[0]}) == 7
    for k in (0, -1, 8):
        with pytest.raises(ValueError, match=f"k is {k}, but the corpus has 7 passages"):
            search(["Bonn"], k)
    with pytest.raises(ValueError, match="query 1 of 2 is empty"):
        search(["Bonn", "  "], 1)
    with pytest.raises(TypeError, match="list of queries"):
        search("Bonn", 1)


def test_many_duplicates_at_the_cut(tmp_path):
    """More equal passages than FAISS is first asked for: still the earliest ones."""
    corpus = [Passage(str(i), "Bonn", "A city.") for i in range(3000)]
    corpus.append(Passage("last", "Bonn Bonn", "Bonn Bonn."))
    for kind, settings in KINDS:
        made = build_index(corpus, tmp_path / kind, kind, **settings)
        for batch in (1, 40):
            top = ids(made(["Bonn"] * batch, 3))
            assert {tuple(t) for t in top} == {("last", "0", "1")}, (kind, batch)
            top = ids(made(["xyzzy"] * batch, 3))  # everything is tied, at nothing
            assert {tuple(t) for t in top} == {("0", "1", "2")}, (kind, batch)


def test_projection_estimates_bm25(tmp_path):
    """Hand-computed BM25 of one term, and the estimate without collisions."""
    encoder = LexicalProjection(dim=4096, title_weight=1)
    corpus = [Passage("1", "x", "apple apple pear"), Passage("2", "y", "pear")]
    encoder.fit(corpus)
    scores = encoder.queries(["apple", "pear pear", "x plum"]) @ encoder.passages(corpus).T
    idf_one, idf_both = np.log(1 + 1.5 / 1.5), np.log(1 + 0.5 / 2.5)

    def weight(tf: int, length: int) -> float:
        return tf / (tf + 1.5 * (0.25 + 0.75 * length / 3))

    expected = [
        [idf_one * weight(2, 4), 0],
        [2 * idf_both * weight(1, 4), 2 * idf_both * weight(1, 2)],
        [idf_one * weight(1, 4), 0],
    ]
    assert scores == pytest.approx(np.array(expected), abs=0.06)
    exact = build_index(corpus, tmp_path, "bm25", title_weight=1)
    assert exact(["apple"], 1)[0][0].score == pytest.approx(expected[0][0], abs=1e-4)
    assert exact(["pear"], 1)[0][0].score == pytest.approx(expected[1][1] / 2, abs=1e-4)


@real
def test_real_hand_picked_queries(hotpot):
    _, made = hotpot
    for search in made.values():
        found = ids(search(["Lilu demon mythology", "Watertown International Airport"], 3))
        assert "Lilu (mythology)" in found[0]
        assert found[1][0] == "Watertown International Airport"


@real
def test_real_recall_and_agreement(hotpot):
    """Measured: recall@3 .685 against .72, overlap of the top three .80."""
    questions, made = hotpot
    texts = [q.text for q in questions]
    top = {kind: ids(search(texts, 3)) for kind, search in made.items()}

    def recall(found: list[list[str]]) -> float:
        pairs = zip(questions, found, strict=True)
        return float(np.mean([len(set(q.supporting_ids) & set(ids)) / 2 for q, ids in pairs]))

    assert recall(top["bm25"]) > 0.68
    assert recall(top["lexical"]) > recall(top["bm25"]) - 0.06
    shared = [len({*a} & {*b}) / 3 for a, b in zip(top["lexical"], top["bm25"], strict=True)]
    assert np.mean(shared) > 0.75


@real
def test_real_results_do_not_depend_on_the_batch(hotpot):
    questions, made = hotpot
    texts = [q.text for q in questions]
    for search in made.values():
        whole = search(texts, 5)
        assert [search([text], 5)[0] for text in texts] == whole
        assert search(texts[::-1], 5) == whole[::-1]
        assert [top[:2] for top in whole] == search(texts, 2)


def test_blocks_of_queries_and_passages_join(tmp_path):
    corpus = [Passage(str(i), f"name{i}", f"value{i % 7}") for i in range(4200)]
    search = build_index(corpus, tmp_path, dim=512)
    picked = [0, 255, 256, 4095, 4096, 4199] * 60
    assert ids(search([f"name{i}" for i in picked], 1)) == [[str(i)] for i in picked]


def test_folder_is_the_same_from_run_to_run(tmp_path):
    """Byte for byte, also under another hash seed."""
    rows = [[p.id, p.title, p.text] for p in CITIES]
    code = (
        "import json, sys\nfrom crrl_lib.records import Passage\n"
        "from crrl_lib.retriever import build_index\n"
        f"corpus = [Passage(*row) for row in json.loads({json.dumps(rows)!r})]\n"
        "for kind in ('lexical', 'bm25'):\n    build_index(corpus, sys.argv[1] + kind, kind)\n"
    )
    trees = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        command = [sys.executable, "-c", code, f"{folder}/"]
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, cwd=tmp_path)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        trees.append({p.relative_to(folder): p.read_bytes() for p in files})
    assert trees[0] == trees[1]
    assert Path("lexical/index.faiss") in trees[0]


def test_loaded_index_answers_as_the_built_one(search, tmp_path):
    kind, settings = search.manifest["encoder"], search.manifest["settings"]
    build_index(CITIES, tmp_path, kind, **settings)
    again = load_index(tmp_path, passages_checksum=corpus_checksum(CITIES), encoder=kind)
    queries = [p.text for p in CITIES]
    assert again(queries, 7) == search(queries, 7)
    assert again.manifest == search.manifest


def test_checksum_is_that_of_the_file(tmp_path):
    import hashlib

    build_index(CITIES, tmp_path / "index", "bm25")
    written = (tmp_path / "index/passages.jsonl").read_bytes()
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in CITIES]
    assert [json.loads(line) for line in written.decode().splitlines()] == rows
    digest = hashlib.sha256(written).hexdigest()
    assert corpus_checksum(CITIES) == digest
    assert corpus_checksum(CITIES[1:]) != digest


def test_what_the_caller_expects_is_held_against_the_manifest(tmp_path):
    build_index(CITIES, tmp_path, dim=64)
    with pytest.raises(ValueError, match="manifest says corpus_sha256 = .*, expected 'abc'"):
        load_index(tmp_path, passages_checksum="abc")
    with pytest.raises(ValueError, match="manifest says encoder = 'lexical', expected 'bm25'"):
        load_index(tmp_path, encoder="bm25")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("rows", 6, "passages.jsonl has 7"),
        ("corpus_sha256", "abc", "passages.jsonl has"),
        ("dim", 65, "the index has 64"),
        ("vectors", 6, "the index has 7"),
        ("metric", "L2", "the index has 'inner product'"),
        ("library", "faiss 0.9", "installed 'faiss"),
    ],
)
def test_a_manifest_that_does_not_match_is_refused(tmp_path, name, value, reason):
    build_index(CITIES, tmp_path, dim=64)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=f"manifest says {name} = .*{reason}.*build it again"):
        load_index(tmp_path)


def test_an_index_of_another_corpus_is_refused(tmp_path):
    build_index(CITIES, tmp_path / "a", dim=64)
    build_index(CITIES[1:], tmp_path / "b", dim=64)
    (tmp_path / "b/index.faiss").replace(tmp_path / "a/index.faiss")
    with pytest.raises(ValueError, match="vectors = 7, the index has 6"):
        load_index(tmp_path / "a")


@pytest.mark.parametrize("encoder", ["lexical", "bm25"])
def test_an_index_of_another_corpus_of_the_same_size_is_refused(tmp_path, encoder):
    others = [replace(p, title=f"X{p.title}", text=p.text.upper()[::-1]) for p in CITIES]
    build_index(CITIES, tmp_path / "a", encoder)
    build_index(others, tmp_path / "b", encoder)
    for kept in ("manifest.json", "passages.jsonl"):
        (tmp_path / "a" / kept).replace(tmp_path / "b" / kept)
    with pytest.raises(ValueError, match="was not made from the passages beside it; build it"):
        load_index(tmp_path / "b")


def test_an_interrupted_build_is_no_index(tmp_path, monkeypatch):
    build_index(CITIES, tmp_path, dim=64)

    def stopped(self, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("crrl_lib.retriever.FlatIndex.save", stopped)
    with pytest.raises(KeyboardInterrupt):
        build_index(CITIES[1:], tmp_path, dim=64)
    with pytest.raises(FileNotFoundError, match=r"no manifest.json.*interrupted"):
        load_index(tmp_path)


def test_bad_builds(tmp_path):
    with pytest.raises(ValueError, match="empty corpus"):
        build_index([], tmp_path)
    with pytest.raises(ValueError, match="ids repeat"):
        build_index([CITIES[0]] * 2, tmp_path)
    with pytest.raises(ValueError, match="'lexical' has no setting size; it takes dim, seed"):
        build_index(CITIES, tmp_path, size=3)
    with pytest.raises(ValueError, match="dim is 0"):
        build_index(CITIES, tmp_path, dim=0)
    with pytest.raises(ValueError, match="no word or number"):
        build_index([Passage("1", "...", "!")], tmp_path)


def test_cuda_without_a_gpu_says_what_to_install(tmp_path):
    faiss = pytest.importorskip("faiss")
    if faiss.get_num_gpus():
        pytest.skip("FAISS sees a GPU here")
    with pytest.raises(RuntimeError, match="FAISS sees no GPU: install the extra gpu"):
        build_index(CITIES, tmp_path, dim=64, device="cuda")


def test_a_model_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match="'intfloat/e5-base-v2' needs the package sentence-tr"):
        build_index(CITIES, tmp_path, "intfloat/e5-base-v2", query_prompt="query: ")


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory):
    """A random BERT behind the real sentence-transformers, with words as tokens."""
    pytest.importorskip("sentence_transformers")
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    words = sorted(
        {w for p in CITIES for w in tokens(f"{p.title} {p.text}")} | {"query", "passage"}
    )
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(vocabulary), num_hidden_layers=1, **sizes)
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    part = Transformer(str(folder / "bert"))
    SentenceTransformer(modules=[part, Pooling(32)], device="cpu").save(str(folder / "model"))
    return str(folder / "model")


def test_a_sentence_transformers_model_by_name(tiny_encoder, tmp_path):
    prompts = {"query_prompt": "query: ", "passage_prompt": "passage: "}
    search = build_index(CITIES, tmp_path, tiny_encoder, **prompts)
    assert search.manifest["dim"] == 32
    queries = [f'"{p.title}"\n{p.text}' for p in CITIES]
    plain = build_index(CITIES, tmp_path / "plain", tiny_encoder)
    for p, (top,) in zip(CITIES, plain(queries, 1), strict=True):
        assert (top.title, top.text) == (p.title, p.text)
        assert top.score == pytest.approx(1, abs=1e-4)  # unit vectors
    assert search(queries, 1)[0][0].score < 0.9999  # the prompts differ, and are used
    assert [search([q], 3)[0] for q in queries] == search(queries, 3)
    assert load_index(tmp_path)(queries, 3) == search(queries, 3)
