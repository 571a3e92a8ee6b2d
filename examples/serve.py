"""Continuous batching over a paged cache, for a Llama and a Qwen3 of transformers.

What it shows: requests come and go while others run, and a step is one batch of tokens, prompts
and single tokens; `RoPE.rotate_and_cache` rotates them and writes to the pages; a request that
starts like a running one shares its pages; a long one drops its oldest pages and shifts its keys.
On CUDA a step of single tokens is a graph. Every request gets the tokens that it would get alone.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import posenc
from posenc.cache import PagedCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# At most BATCH requests run, each with at most WIDTH pages; SINKS tokens are never evicted.
PAGES, PAGE, BATCH, WIDTH, SINKS = 48, 8, 4, 10, 4


@dataclass(eq=False)
class Request:
    tokens: list[int]
    length: int  # of the prompt and the answer
    window: int = WIDTH * PAGE  # how many tokens it may have in the cache
    cached: int = 0  # how many of its tokens the cache has, or has had

    def pages(self):
        return -(-min(self.length, self.window) // PAGE) + 1  # one for a copy


def shared_prefix(a, b):
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


class Server:
    def __init__(self, model):
        self.model, config = model, model.config
        # The tables of a graph must not grow: give max_seq_len.
        self.rope = posenc.RoPE.from_config(config, max_seq_len=WIDTH * PAGE)
        sizes = {"num_kv_heads": config.num_key_value_heads, "layers": config.num_hidden_layers}
        rows = {"head_dim": self.rope.head_dim, "dtype": model.dtype, "device": DEVICE}
        self.cache = PagedCache(PAGES, page_size=PAGE, **sizes, **rows)
        self.waiting, self.running = deque(), []
        self.steps = self.shared = self.evicted = 0
        self.decode = self.captured() if DEVICE == "cuda" else self.forward

    def forward(self, tokens, positions, slots, table):
        """Logits of T tokens of any requests; a row of ``table`` has the pages of a token's."""
        model, cache = self.model.model, self.cache
        x = model.embed_tokens(tokens)
        seen = torch.arange(WIDTH * PAGE, device=DEVICE) <= positions[:, None]
        for i, layer in enumerate(model.layers):
            attention, norms = layer.self_attn, {}
            if hasattr(attention, "q_norm"):
                norms = {"q_weight": attention.q_norm.weight, "k_weight": attention.k_norm.weight}
                norms["eps"] = self.model.config.rms_norm_eps
            hidden = layer.input_layernorm(x)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (p(hidden).unflatten(-1, (-1, self.rope.head_dim)) for p in projections)
            pages = cache.k[i], cache.v[i]
            q = self.rope.rotate_and_cache(q, k, v, *pages, slots, position_ids=positions, **norms)
            # Runs anywhere, but copies the pages; kernels for paged attention read them in place.
            k, v = (each[table].flatten(1, 2).transpose(1, 2) for each in pages)
            mask, q = seen[:, None, None], q[:, :, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + attention.o_proj(out.flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(model.norm(x))

    def captured(self):
        """`forward` of BATCH tokens as a CUDA graph."""
        tokens, positions, slots = torch.zeros(3, BATCH, dtype=torch.int64, device=DEVICE)
        table = torch.zeros(BATCH, WIDTH, dtype=torch.int32, device=DEVICE)
        inputs = tokens, positions, slots.fill_(-1), table
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(*inputs)  # compiles kernels and makes tables
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.forward(*inputs)

        def replay(*new):
            for old, x in zip(inputs, new, strict=True):
                old.copy_(x)
            graph.replay()
            return logits

        return replay

    def admit(self):
        """Start requests that wait, if there are pages for all tokens that they may have."""
        while self.waiting and len(self.running) < BATCH:
            if sum(each.pages() for each in (self.waiting[0], *self.running)) > PAGES:
                return
            request, parent = self.waiting.popleft(), None
            for other in self.running:
                # One that has evicted tokens has no prefix to share.
                if other.cached == self.cache.length(other):
                    # The last token of a prompt is computed: the next comes from its logits.
                    same = shared_prefix(request.tokens[:-1], other.tokens[: other.cached])
                    if same > request.cached:
                        request.cached, parent = same, other
            if parent is None:
                self.cache.allocate(request, 0)
            else:
                self.cache.fork(parent, request, request.cached)
            self.shared += request.cached
            self.running.append(request)

    def step(self):
        """One token more for each request that runs."""
        self.admit()
        cache, running, tokens, places = self.cache, self.running, [], []
        for request in running:
            new = request.tokens[request.cached :]
            while cache.length(request) + len(new) > request.window:
                cache.evict(request, drop=PAGE, keep_first=SINKS, shift=self.rope.shift)
                self.evicted += PAGE
            tokens += new
            places.append(cache.allocate(request, len(new)))
        tokens = torch.tensor(tokens, device=DEVICE)
        positions = torch.tensor([place for each in places for place in each], device=DEVICE)
        slots = cache.slot_mapping(running, places)
        table, _ = cache.block_table(running, width=WIDTH)
        if len(tokens) == len(running):
            # A graph has a fixed number of tokens; those that are not there store nothing.
            more = (0, BATCH - len(tokens))
            batch = F.pad(tokens, more), F.pad(positions, more), F.pad(slots, more, value=-1)
            logits = self.decode(*batch, F.pad(table, (0, 0, *more)))[: len(tokens)]
        else:
            counts = torch.tensor([len(each) for each in places], device=DEVICE)
            batch = tokens, positions, slots, table.repeat_interleave(counts, 0)
            logits = self.forward(*batch)[counts.cumsum(0) - 1]
        for request, token in zip(list(running), logits.argmax(-1).tolist(), strict=True):
            request.cached = len(request.tokens)
            request.tokens.append(token)
            if len(request.tokens) == request.length:
                cache.free(request)
                running.remove(request)
        self.steps += 1


def alone(model, rope, prompt, length, window=WIDTH * PAGE):
    """The request by transformers: `generate`, or a loop that evicts from its `DynamicCache`."""
    tokens = new = torch.tensor([prompt], device=DEVICE)
    if length <= window:
        how = {"attention_mask": torch.ones_like(tokens), "do_sample": False}
        return model.generate(tokens, max_length=length, **how)[0].tolist()
    cache = DynamicCache(config=model.config)
    while tokens.shape[1] < length:
        while cache.get_seq_length() + new.shape[1] > window:
            for layer in cache.layers:
                k, v = layer.keys, layer.values
                moved = rope.shift(k[:, :, SINKS + PAGE :], -PAGE)
                layer.keys = torch.cat((k[:, :, :SINKS], moved), 2)
                layer.values = torch.cat((v[:, :, :SINKS], v[:, :, SINKS + PAGE :]), 2)
        new = model(new, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, new), 1)
    return tokens[0].tolist()


@torch.inference_mode()
def main(name, model):
    torch.manual_seed(0)
    for parameter, weight in model.eval().to(DEVICE).named_parameters():
        weight.normal_(1.0 if "norm" in parameter else 0.0, 0.2)
    text = torch.randint(256, (6, 40)).tolist()
    start = text[0][:19]
    asked = [(start + text[1][:4], 50), (text[2][:3], 12), (text[3], 80, 48)]
    asked += [(start + text[4][:7], 45), (text[5][:26], 38), (text[5][:1], 25)]
    requests = [Request(list(prompt), *limits) for prompt, *limits in asked]
    server = Server(model)
    server.waiting += requests[:3]
    for _ in range(3):
        server.step()
    server.waiting += requests[3:]
    while server.waiting or server.running:
        server.step()

    wanted = [alone(model, server.rope, *request) for request in asked]
    wrong = sum(request.tokens != tokens for request, tokens in zip(requests, wanted, strict=True))
    print(f"{name}: {len(requests)} requests in {server.steps} steps of at most {BATCH};")
    print(f"  {server.shared} tokens of a prompt were shared, {server.evicted} were evicted;")
    print(f"  {name} answers that differ from those alone: {wrong}")


if __name__ == "__main__":
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    main("Llama", LlamaForCausalLM(LlamaConfig(**sizes)))
    main("Qwen3", Qwen3ForCausalLM(Qwen3Config(**sizes)))
