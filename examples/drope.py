"""DroPE: train a small Llama with RoPE, drop the rotation, and train a little more without it.

What it shows: a dropped model needs its recalibration, and `unpatch` brings the rotation back.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posenc.interop.huggingface import drop_rotation, unpatch
from posenc.lab.comparison.text import load

LENGTH, BATCH = 48, 16

torch.manual_seed(0)
tales = load()
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, vocab_size=tales.symbols))


def excerpts(text: torch.Tensor, length: int) -> torch.Tensor:
    """Parts of a text, from random places."""
    begin = torch.randint(len(text) - length, (BATCH, 1))
    return text[begin + torch.arange(length)]


def train(steps: int, rate: float) -> None:
    """At the original length, with warm-up and a cosine, as the paper recalibrates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        ids = excerpts(tales.train, LENGTH)
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def loss(length: int = LENGTH) -> float:
    """Nats for each byte of held-out text."""
    ids = torch.cat([excerpts(tales.held, length) for _ in range(8)])
    return float(model(ids, labels=ids).loss)


train(steps=300, rate=3e-3)
some = excerpts(tales.held, LENGTH)
before = model(some).logits
print(f"trained with RoPE: {loss():.2f}, at 8 times the length {loss(8 * LENGTH):.2f}")
drop_rotation(model)
print(f"rotation dropped:  {loss():.2f}, at 8 times the length {loss(8 * LENGTH):.2f}")
unpatch(model)
print(f"and back: logits are off by {(model(some).logits - before).abs().max():.1e}")
drop_rotation(model)
train(steps=100, rate=3e-3)
print(f"recalibrated:      {loss():.2f}, at 8 times the length {loss(8 * LENGTH):.2f}")
