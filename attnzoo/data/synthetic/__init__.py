"""Tasks whose answers are known by construction: pure functions from sizes and a seed to one example, and their data modules.

Tasks made of tokens: `recall.example`, `copying.example`, `induction.example`, each `(seq_len, *, seed, ...) -> (input_ids, labels)`, two
int64 arrays `(seq_len,)`; `labels[t]` is what `logits[t]` must predict, or -100 if there is no target. Tasks made of text, for any
tokenizer: `passkey.example`, and `haystack.hide` for needles of any kind; both return a `haystack.Haystack`. Classification of whole
sequences: `listops.example`.

`seed` is an int or a sequence of ints, such as (run, split, row). The result depends only on the seed and on the other arguments.
"""
