"""Fused attention (`npu_fused_infer_attention_score`, v1 and v2) on a CPU, written from the operator sheet.

call     one form for the two argument lists
layout   layouts, lengths, and the per-sequence views of q, k, v, paged or not
visible  which keys a query sees: sparse modes, masks, the two Q_S = 1 special cases
attend   the arithmetic of one sequence
ops      the registered operators
fusion   the training operator that older code calls
"""
