"""Attacks on single phrases, with arguments that all modules have in common.

A prefix p is int64 [L], BOS first. A continuation s is int64 [n], and several are [N, n]. The references R are int64
[|R|, n], in any order and with repetitions, and are read fastest in lexicographic order. A template is the space of
continuations: the token ids that are allowed at each position.
"""
