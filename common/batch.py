"""The batch that one stage of a step passes to the next, and its balance over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.clock import timed
from common.distributed import World, from_all


class Rollout:
    """N = P·G sampled responses, where row i answers prompt i // G. Each attribute that is set is a
    column, a tensor of N rows, and a loss reads the columns that it needs. There are P prompts with
    G responses each, of at most T tokens; with the prompt a row has at most S tokens.

    The sampler writes, in `generate`:
        sequences `[N, S]`      prompt, prefix and response, right-padded
        prompt_len `[N]`        tokens before the sampled response, prefix included
        prefix_len `[N]`        how many of these belong to a response prefix (0 without a prefix)
        tokens `[N, T]`         the sampled tokens, with a tool's output between them; right-padded
        mask `[N, T]`           1.0 on sampled tokens, the EOS that ended them included; else 0.0.
                                A row's last token is always a sampled one
        rollout_logp `[N, T]`   log μ(token) at the sampling temperature, as the sampler reports it
        finished `[N]`          False if the response reached the length limit without EOS
        sampler_experts `[N, S, layers, k]`  the k experts to which each layer sent each token
    `Task.score` writes:
        problem `[N]`           the number of the training problem
        rewards `[N]`           the verifier's rewards
        new_answer `[N]`        1.0 if no earlier response of the group has the same answer
        judge_failed `[N]`      1.0 if the verifier failed on the response, which earns 0 then
    Every `main` writes, after the rewards:
        advantages `[N]`        Â of the whole response
    Every `main` writes, before the first optimiser step:
        old_logp `[N, T]`       log π_old(token), by the trainer; for the first mini-batch often in
                                the pass of its own update, because π_θ is still π_old then
        ref_logp `[N, T]`       log π_ref(token), of the model before training; only with a KL term
    Every `main` writes, in the update, for metrics and samples.jsonl:
        logp, entropy `[N, T]`  of π_θ, before the optimiser step
        weight `[N, T]`         on ∇ log π_θ(token) in the gradient
    Some files write these, and `common` reads them if they are there:
        replayed_experts        like sampler_experts: where the trainer must send each token
        token_advantages `[N, T]`  Â of each token, instead of the response's
        NAME_logp `[N, T]`      log-probs under a further model, shown in samples.jsonl
    A file may add columns of its own, such as masks of tokens, and describes them itself.

    Columns of experts stay on the CPU: with long responses they take gigabytes, and the trainer
    reads one micro-batch of them at a time.
    """

    ref_logp: Tensor | None = None  # without a KL term; a class's default, so not in vars(batch)

    def __init__(self, **columns: Tensor):
        vars(self).update(columns)

    @property
    def ends(self) -> Tensor:
        """The number of tokens in each row of `sequences`, `[N]`."""
        # [N, T], columns from the right: how many sampled tokens stand here or later in the row
        still_to_come = self.mask.flip(1).cumsum(1)
        return self.prompt_len + (still_to_come > 0).sum(1)

    @classmethod
    def pack(
        cls,
        *,
        prompts: list[list[int]],
        tokens: list[list[int]],
        logps: list[list[float]],
        eos: list[int],
        device: torch.device | str,
        prefixes: list[list[int]] | None = None,
        experts: list[Tensor] | None = None,
        masks: list[list[float]] | None = None,
    ) -> Rollout:
        """Make a batch from lists: prompts and prefixes have an entry for each group, the others
        for each row. Without `masks`, all tokens count as sampled."""
        n = len(tokens) // max(1, len(prompts))  # responses per prompt; a rank may have no prompts
        prefixes = prefixes or [[] for _ in prompts]
        starts = []  # prompt and prefix of each row
        for prompt, prefix in zip(prompts, prefixes):
            starts += [(prompt, prefix)] * n

        def padded(rows: list, dtype: torch.dtype, device: torch.device | str = device) -> Tensor:
            tensors = [torch.as_tensor(row, dtype=dtype) for row in rows or [[]]]
            return pad_sequence(tensors, batch_first=True)[: len(rows)].to(device)

        columns = {}
        if experts:
            columns["sampler_experts"] = padded(experts, experts[0].dtype, "cpu")
        sequences = [prompt + prefix + row for (prompt, prefix), row in zip(starts, tokens)]
        ended = [bool(row) and row[-1] in eos for row in tokens]
        return cls(
            sequences=padded(sequences, torch.long),
            prompt_len=torch.tensor([len(p + q) for p, q in starts], dtype=torch.long).to(device),
            prefix_len=torch.tensor([len(q) for _, q in starts], dtype=torch.long).to(device),
            tokens=padded(tokens, torch.long),
            mask=padded(masks or [[1.0] * len(row) for row in tokens], torch.float32),
            rollout_logp=padded(logps, torch.float32),
            finished=torch.tensor(ended, dtype=torch.bool).to(device),
            **columns,
        )

    def rows(self, index: Tensor | slice) -> Rollout:
        """Return the sub-batch of these rows. `index` may be on any device."""
        columns = {}
        for name, column in vars(self).items():
            place = index.to(column.device) if isinstance(index, Tensor) else index
            columns[name] = column[place]
        return Rollout(**columns)

    def split(self, parts: int) -> list[Rollout]:
        """Cut the batch into equal parts, in order; `parts` must divide the number of rows."""
        size = len(self) // parts
        return [self.rows(slice(i * size, (i + 1) * size)) for i in range(parts)]

    @classmethod
    def join(cls, *parts: Rollout) -> Rollout:
        """Join the rows of several batches into one batch, padded to the longest row."""

        def joined(columns: list[Tensor]) -> Tensor:
            if columns[0].dim() == 1:
                return torch.cat(columns)
            rows = [row for column in columns for row in column]
            return pad_sequence(rows, batch_first=True)

        full = [vars(part) for part in parts if len(part)]  # an empty batch may lack columns
        return cls(**{name: joined([part[name] for part in full]) for name in full[0]})

    def to(self, device: torch.device) -> Rollout:
        """Return the batch on another device; columns of experts stay on the CPU."""
        columns = {}
        for name, column in vars(self).items():
            columns[name] = column if name.endswith("_experts") else column.to(device)
        return Rollout(**columns)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        """Return the columns with their shapes, for a print in a debugger."""
        columns = [f"{name} {list(column.shape)}" for name, column in vars(self).items()]
        return f"Rollout of {len(self)} rows: {', '.join(columns)}"

    def put(self, rows: Tensor, **columns: Tensor) -> None:
        """Write values into these rows of columns. A new column is 0 in all other rows."""
        for name, values in columns.items():
            if name not in vars(self):
                setattr(self, name, values.new_zeros(len(self), *values.shape[1:]))
            getattr(self, name)[rows] = values

    def response_ids(self) -> list[list[int]]:
        """Return each row's whole response: its prefix and its sampled tokens."""
        starts = (self.prompt_len - self.prefix_len).tolist()
        rows = zip(self.sequences.tolist(), starts, self.ends.tolist())
        return [row[start:end] for row, start, end in rows]


@timed("balance")  # here a rank first waits for those that still sample or score
def balance_tokens(batch: Rollout, world: World, unit: int = 1) -> Rollout:
    """Exchange rows until all ranks have about equally many tokens. All ranks must call it.

    This saves time, because in every pass all ranks wait for the rank with the most tokens. It
    changes no sum over all ranks. `unit` neighbouring rows stay together. A rank may have no rows.
    """
    if world.size == 1:
        return batch
    lengths = batch.ends.view(-1, unit).sum(dim=1).tolist()  # tokens of each unit
    widths = {name: column.shape[1] for name, column in vars(batch).items() if column.dim() > 1}
    shares = from_all((lengths, widths))
    units = []  # (tokens, rank, number on that rank)
    for rank, (rank_lengths, _) in enumerate(shares):
        units += [(tokens, rank, place) for place, tokens in enumerate(rank_lengths)]
    load = [0] * world.size  # tokens that each rank will have
    goes_to = [[0] * len(rank_lengths) for rank_lengths, _ in shares]  # [rank][number] -> new rank
    for tokens, rank, place in sorted(units, key=lambda entry: -entry[0]):
        least = load.index(min(load))  # the longest unit first, to the rank with the fewest tokens
        goes_to[rank][place] = least
        load[least] += tokens
    destination = torch.tensor(goes_to[world.rank]).long().repeat_interleave(unit)  # [n]: ranks
    order = destination.argsort(stable=True)  # [n]: this rank's rows by the rank they go to
    sent = destination.bincount(minlength=world.size).tolist()  # rows to each rank
    received = [places.count(world.rank) * unit for places in goes_to]  # rows from each rank

    def exchange(name: str, column: Tensor) -> Tensor:
        column = column[order.to(column.device)]
        if column.dim() > 1:  # pad to the widest rank's width
            missing = max(width[name] for _, width in shares) - column.shape[1]
            filler = column.new_zeros(len(column), missing, *column.shape[2:])
            column = torch.cat([column, filler], dim=1)
        # Send bytes [n, bytes], because no backend knows every dtype. A column [n] becomes [n, 1].
        packed = column.unsqueeze(-1).flatten(1).view(torch.uint8)
        arrived = packed.new_empty(sum(received), packed.shape[1])
        dist.all_to_all_single(arrived, packed, received, sent)
        return arrived.view(column.dtype).view(-1, *column.shape[1:])

    columns = {}
    for name in sorted(vars(batch)):  # in the same order on all ranks
        columns[name] = exchange(name, getattr(batch, name))
    return Rollout(**columns)
