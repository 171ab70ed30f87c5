"""score_mod and mask_mod: Python functions of one logit, with the signatures of FlexAttention.

tracing.trace(function)         runs it once on symbols and returns the `graph.Graph` of it
operations.OPERATIONS           what a graph is made of: C++ text, derivative, torch evaluation
derivative.derivative(graph)    d score' / d score, and those of captured tensors
cpp.source(graph)               the graph as a C++ struct
scores, masks                   which options of `attention` a graph is
"""
