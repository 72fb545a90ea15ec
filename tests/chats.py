"""A tiny Qwen3 in a folder as `transformers` saves it, with a tokenizer of bytes and a chat template, and conversations
that it can learn: sums, which it does not know."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import fzero
from fzero.checkpoint import huggingface
from fzero.data import json_tokenizer
from fzero.models import LlamaConfig, build, init_params
from fzero.run import run_folder

TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and loop.index0 % 2 == 0 %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
UNMARKED = TEMPLATE.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
# As Qwen3's: what was thought before the last answer is left out.
SAID = "%}\n{{ message.content"
FORGETFUL = UNMARKED.replace(SAID, SAID.replace("message.content", "(message.content if loop.last else thought[-1])"))
BEGIN = "{%- if message.role == 'assistant' %}\n"
FORGETFUL = FORGETFUL.replace(BEGIN, "{%- set thought = message.content.split('</think>') %}\n" + BEGIN)
assert FORGETFUL != UNMARKED
QWEN3 = LlamaConfig(
    vocab_size=260, max_len=96, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, qk_norm=True, norm_eps=1e-6
)


def tokenizer():
    """A byte-level tokenizer with the special tokens of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    return library


def qwen3_folder(folder, template=TEMPLATE, config=QWEN3, seed=0):
    """Write the model to `folder`."""
    source = folder.with_name(f"{folder.name}-tokenizer")
    source.mkdir(parents=True)
    tokenizer().save(str(source / "tokenizer.json"))
    weights = init_params(build(config), fzero.random.key(seed))
    huggingface.save_hf(folder, config, weights, tokenizer=source, eos=256, architecture="Qwen3ForCausalLM")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def sums(n=40):
    """Conversations about sums of one digit."""
    for i in range(n):
        a, b = i % 7, (i * 3) % 5
        yield [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"It is {a + b}."}]


def write_lines(path, rows):
    """Write a .jsonl file, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_file(path, n=40):
    """The conversations as a file."""
    return write_lines(path, [{"messages": messages} for messages in sums(n)])


def pairs(n=40):
    """Questions with a right and a wrong answer, in messages."""
    for i, (question, answer) in enumerate(sums(n)):
        wrong = {"role": "assistant", "content": f"It is {(i * 5) % 9 + 3}, I am quite sure of it."}
        yield {"prompt": [question], "chosen": [answer], "rejected": [wrong]}


def pair_file(path, n=40):
    """The pairs as a file."""
    return write_lines(path, pairs(n))


# Of `fzero finetune`, for runs of these models: nothing is compiled, and nothing measured.
FLAGS = ["--batch", 4, "--micro-batch", 2, "--seq-len", 96, "--lr", "1e-2", "--precision", "fp32", "--peak-tflops", 1,
         "--set", "train.compiled=false", "--set", "train.memory_check=false", "--set", "train.loggers=[]"]  # fmt: skip


def tuning_folder(place):
    """A folder with the model, conversations and pairs."""
    qwen3_folder(place / "qwen3")
    chat_file(place / "chat.jsonl")
    pair_file(place / "pairs.jsonl")
    return place


def our_tokenizer():
    """The tokenizer as a run reads it."""
    return json_tokenizer(tokenizer().to_str(), "chat", 256)


def column(run, name):
    """The values of a column of a run's metrics, of the rows that have it."""
    return [row[name] for row in run_folder.read_metrics(run) if name in row]
