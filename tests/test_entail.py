"""Containment, word for word and by a real (tiny, untrained or hand-set) NLI model."""

from __future__ import annotations

import pytest

from crrl_lib import protocol
from crrl_lib.entail import NOTHING, claims, entailment, lexical_containment, nli_containment
from crrl_lib.records import Passage

TEXAS = Passage("1", "Victoria", "Victoria is a city in Texas. It has 65,534 inhabitants.")
CANADA = Passage("2", "Victoria", "Victoria is a city in Canada.")
LILU = Passage("3", "Lilu (mythology)", "A lilu is a spirit. St. John knew it.")
DOCUMENTS = [TEXAS, CANADA, LILU]


@pytest.mark.parametrize(
    ("refined", "contained"),
    [
        (TEXAS.text, True),
        ("It has 65,534 inhabitants.", True),
        ("it has 65534 inhabitants", True),
        ("has 65,534 inhabitants", True),
        ("Victoria is a city in Texas. A lilu is a spirit.", True),
        ("Victoria is a city in Texas.\nVictoria is a city in Canada.", True),
        ("Lilu (mythology)", True),  # a title is text too
        ("St. John knew it.", True),
        ("Nothing relevant.", True),
        ("nothing relevant", True),
        ("", False),
        ("  ...  ", False),
        ("Victoria is a city.", True),
        ("Victoria is a town in Texas.", False),
        ("It has 65,535 inhabitants.", False),
        ("It has 65 inhabitants.", False),
        ("Victoria is a city in Texas. It is large.", False),
        ("city in Texas It has 65,534 inhabitants in Canada", False),
        ("Texas. A lilu", True),  # two fragments, each in one document …
        ("Texas, a lilu", False),  # … but no sentence across documents
        # with headers
        ("(Title: Victoria) Victoria is a city in Canada.", True),
        ("Doc 1(Title: Victoria) It has 65,534 inhabitants.\nDoc 3(Title: Lilu (mythology)) "
         "A lilu is a spirit.", True),
        ("(Title: Lilu (mythology)) Victoria is a city in Canada.", False),  # wrong name
        ("(Title: Vienna) Victoria is a city in Canada.", False),  # unknown name
        ("(Title: Victoria)", False),  # says nothing
        ("(Title: Victoria) Nothing relevant.", False),
    ],
)  # fmt: skip
def test_lexical(refined, contained):
    assert lexical_containment([(refined, DOCUMENTS)]) == [contained]


def test_lexical_batch_and_no_documents():
    pairs = [("A lilu is a spirit.", [LILU]), ("A lilu is a spirit.", [TEXAS]), (NOTHING, [])]
    assert lexical_containment(pairs) == [True, False, True]
    assert lexical_containment([("x", [])]) == [False]
    assert lexical_containment([]) == []


def test_nothing_is_worded_as_in_the_protocol():
    assert NOTHING == protocol.NOTHING_RELEVANT


def test_rendered_passages_contain_themselves():
    rendered = protocol.render_passages(DOCUMENTS)
    assert lexical_containment([(rendered, DOCUMENTS)]) == [True]
    asked = claims(rendered, DOCUMENTS)
    assert [sentence for sentence, _ in asked] == [
        "Victoria is a city in Texas.",
        "It has 65,534 inhabitants.",
        "Victoria is a city in Canada.",
        "A lilu is a spirit.",
        "St.",
        "John knew it.",
    ]
    assert asked[0][1] == [TEXAS, CANADA]
    assert asked[3][1] == [LILU]


def test_the_longest_title_wins():
    short, long = Passage("1", "Paris", "a"), Passage("2", "Paris) (Texas", "b")
    ((_, known),) = claims("(Title: Paris) (Texas) b", [short, long])
    assert known == [long]


LABELS = {0: "contradiction", 1: "ENTAILMENT", 2: "neutral"}


def save_model(folder, labels: dict[int, str], copying: bool = False) -> str:
    """Write a tiny BERT classifier with words as tokens; ``copying`` sets weights by hand.

    The hand-set one entails when a document holds the word "texas", whatever the sentence says.
    """
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = sorted({*"abcdefghijklmnopqrstuvwxyz.()", "victoria", "city", "texas", "canada", "has"})
    vocabulary = {word: i for i, word in enumerate(special + words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=16,
        max_position_embeddings=64,
        id2label=labels,
        label2id={name: i for i, name in labels.items()},
    )
    model = BertForSequenceClassification(config)
    if copying:
        _set_weights(model, vocabulary["texas"])
    model.save_pretrained(folder)
    return str(folder)


def _set_weights(model, word: int) -> None:
    """Let [CLS] look at every token alike; feature 0 says whether one of them is ``word``."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        bert = model.bert
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.fill_(1)
        # Two features of opposite sign survive layer normalisation.
        bert.embeddings.word_embeddings.weight[:, 1] = 1
        bert.embeddings.word_embeddings.weight[word] *= 0
        bert.embeddings.word_embeddings.weight[word, 0] = 1
        attention = bert.encoder.layer[0].attention
        attention.self.value.weight.copy_(torch.eye(16))
        attention.self.value.weight[0, 0] = 20  # one token in ten is enough
        attention.output.dense.weight.copy_(50 * torch.eye(16))
        bert.pooler.dense.weight.copy_(torch.eye(16))
        model.classifier.weight[1, 0] = 10
        model.classifier.weight[1, 1] = -10


def test_nli_reads_the_documents(tmp_path):
    """A sentence passes when one document of its name entails it."""
    check = nli_containment(save_model(tmp_path, LABELS, copying=True), max_length=64)
    made = check(
        [
            ("Victoria is a city.", [CANADA, Passage("4", "x", "texas texas texas texas")]),
            ("Victoria is a city.", [CANADA, LILU]),
            ("(Title: x) It has. A spirit.", [CANADA, Passage("4", "x", "texas texas texas")]),
            ("(Title: Victoria) It has.", [CANADA, Passage("4", "x", "texas texas texas")]),
            (NOTHING, []),
            ("", [TEXAS]),
            ("Victoria", []),
        ]
    )
    assert made == [True, False, True, False, True, False, False]


def test_nli_matches_the_model_asked_by_hand(tmp_path):
    """An untrained model's own probability is the threshold's other side, in any batch."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    name = save_model(tmp_path, LABELS)
    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    premises = [f"{p.title}. {p.text}" for p in (TEXAS, CANADA)]
    sentences = ["Victoria is a city in Canada.", "It has inhabitants."]
    with torch.no_grad():
        chances = [
            max(
                model(**tokenizer(p, s, return_tensors="pt")).logits.softmax(-1)[0, 1].item()
                for p in premises
            )
            for s in sentences
        ]
    weakest = min(chances)
    pairs = [(" ".join(sentences), [TEXAS, CANADA]), (sentences[0], [LILU])]
    for size in (1, 2, 32):
        below = entailment(name, threshold=weakest - 1e-4, batch_size=size)
        above = entailment(name, threshold=weakest + 1e-4, batch_size=size)
        assert below(pairs)[0] is True
        assert above(pairs)[0] is False
    assert below([]) == []


def test_long_documents_are_cut_not_refused(tmp_path):
    check = nli_containment(save_model(tmp_path, LABELS, copying=True), max_length=16)
    late = Passage("1", "x", "city " * 50 + "texas " * 50)
    early = Passage("2", "x", "texas " * 50)
    assert check([("It has.", [late]), ("It has.", [early])]) == [False, True]


@pytest.mark.parametrize(
    ("labels", "fits"),
    [
        ({0: "entailment", 1: "not_entailment"}, True),
        ({0: "LABEL_0", 1: "LABEL_1"}, False),
        ({0: "entailment", 1: "entailed"}, False),
    ],
)
def test_the_label_is_read_from_the_model(tmp_path, labels, fits):
    name = save_model(tmp_path, labels)
    if fits:
        assert nli_containment(name)([(NOTHING, [])]) == [True]
    else:
        with pytest.raises(ValueError, match=r"has the labels \[.*\]; expected exactly one"):
            nli_containment(name)


def test_choice_by_name():
    assert entailment("lexical") is lexical_containment
    with pytest.raises(ValueError, match="lexical check has no options, got threshold"):
        entailment("lexical", threshold=0.5)
    with pytest.raises(ValueError, match="threshold is 1.5"):
        entailment("any/model", threshold=1.5)
