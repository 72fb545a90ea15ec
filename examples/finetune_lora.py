"""Fine-tune a Qwen3 with LoRA on conversations, from Python: the run of `fzero finetune --lora rank=8`.

python examples/finetune_lora.py [FOLDER CHAT.jsonl]    # without them: a tiny random Qwen3 and sums, made here
"""

import json
import sys
import tempfile
from pathlib import Path

import fzero
from fzero import models
from fzero.checkpoint import huggingface
from fzero.run import Options, run_folder, train_run, tuned_config

TEMPLATE = """{% for m in messages %}<{{ m.role }}>
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}#{% endgeneration %}{% else %}{{ m.content }}#{% endif %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def make(place: Path) -> tuple[Path, Path]:
    """A tiny random Qwen3 that reads bytes, and a file of conversations."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    sizes = models.LlamaConfig(257, 64, 32, 2, 4, 2, 64, qk_norm=True, norm_eps=1e-6)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({**{letter: i for i, letter in enumerate(alphabet)}, "<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(place / "tokenizer.json"))
    weights = models.init_params(models.build(sizes), fzero.random.key(0))
    folder = huggingface.save_hf(
        place / "qwen3", sizes, weights, tokenizer=place, eos=256, architecture="Qwen3ForCausalLM"
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    said = [[("user", f"{a}+{b}"), ("assistant", f"It is {a + b}.")] for a in range(7) for b in range(6)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in said]
    (place / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder, place / "chat.jsonl"


place = Path(tempfile.mkdtemp())
folder, chats = map(Path, sys.argv[1:]) if len(sys.argv) > 1 else make(place)

table = {
    "data": {"path": str(chats), "seq_len": 64},
    "train": {"steps": 20, "batch": 4, "micro_batch": 4, "compiled": False},
    "optim": {"lr": 1e-2},
}
config = tuned_config(folder, table, lora={"rank": 8, "alpha": 32.0})
train_run(place / "tuned", config, init=folder, options=Options(sample=""))

losses = [row["loss"] for row in run_folder.read_metrics(place / "tuned")]
print(f"loss on what the assistant says: {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0] - 0.3
print(f"merge it: fzero export {place / 'tuned'} --out MERGED; or for PEFT: --adapter")
