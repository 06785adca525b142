"""The benchmarks behind every claim about speed or memory, baselines included: `ctxext bench NAME`.

A benchmark compares sides: ours and a plain way of doing the same, each in a process of its own, in turn (A B A B),
on the same model, dtype, threads and batch. It reports the median of each side, the ratio of the medians, the peak
memory of the whole process, and whether the answers agree.
"""
