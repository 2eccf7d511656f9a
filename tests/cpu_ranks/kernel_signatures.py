"""Arguments of the low-level attention entries, by package version; those that end in = have a default."""

FLASH_2 = {
    "2.7.0": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left= "
        "window_size_right= softcap= alibi_slopes= return_softmax= block_table= leftpad_k= seqused_k=",
        "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
        "softmax_scale causal window_size_left window_size_right softcap alibi_slopes deterministic rng_state=",
    ),
    "2.8.4": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left= "
        "window_size_right= softcap= alibi_slopes= return_softmax= block_table= leftpad_k= seqused_k= zero_tensors= "
        "num_splits=",
        "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
        "softmax_scale causal window_size_left window_size_right softcap alibi_slopes deterministic rng_state= "
        "zero_tensors=",
    ),
}
FLASH_2_OLD = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size= softcap= "
    "alibi_slopes= return_softmax= block_table= leftpad_k= seqused_k=",
    FLASH_2["2.7.0"][1],
)
FLASH_3 = {
    "2.8.3": (
        "q k v k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
        "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale "
        "v_descale softmax_scale causal window_size= attention_chunk= softcap= rotary_interleaved= "
        "scheduler_metadata= num_splits= pack_gqa= sm_margin=",
        "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv "
        "softmax_scale causal window_size= softcap= deterministic= sm_margin=",
    ),
    "2.8.4": (
        "q k v k_new= v_new= qv= out_= cu_seqlens_q= cu_seqlens_k= cu_seqlens_k_new= seqused_q= seqused_k= "
        "max_seqlen_q= max_seqlen_k= page_table= kv_batch_idx= leftpad_k= rotary_cos= rotary_sin= seqlens_rotary= "
        "q_descale= k_descale= v_descale= softmax_scale= causal= window_size_left= window_size_right= "
        "attention_chunk= softcap= rotary_interleaved= scheduler_metadata= num_splits= pack_gqa= sm_margin=",
        "dout q k v out softmax_lse cu_seqlens_q= cu_seqlens_k= sequed_q= sequed_k= max_seqlen_q= max_seqlen_k= dq= "
        "dk= dv= softmax_scale= is_causal= window_size_left= window_size_right= softcap= deterministic= sm_margin=",
    ),
}
_CUTE_BACKWARD = (
    "q k v out dout lse softmax_scale= causal= softcap= window_size_left= window_size_right= m_block_size= "
    "n_block_size= num_threads= pack_gqa= num_stages_Q= num_stages_dO= SdP_swapAB= dKV_swapAB= dQ_swapAB= "
    "AtomLayoutMSdP= AtomLayoutNdKV= AtomLayoutMdQ= V_in_regs= cu_seqlens_q= cu_seqlens_k= seqused_q= seqused_k= "
    "max_seqlen_q= max_seqlen_k= deterministic= dq= dk= dv= score_mod= score_mod_bwd= mask_mod= aux_tensors= "
)
FLASH_4 = {
    "4.0.0b0": (
        "q k v cu_seqlens_q= cu_seqlens_k= seqused_q= seqused_k= max_seqlen_q= max_seqlen_k= page_table= "
        "softmax_scale= causal= softcap= window_size_left= window_size_right= learnable_sink= m_block_size= "
        "n_block_size= num_threads= num_splits= pack_gqa= _arch= score_mod= mask_mod= block_sparse_tensors= "
        "return_lse= out= lse= aux_tensors=",
        _CUTE_BACKWARD + "block_sparse_tensors=",
    ),
    "4.0.0b27": (
        "q k v qv= cu_seqlens_q= cu_seqlens_k= seqused_q= seqused_k= max_seqlen_q= max_seqlen_k= min_seqlen_k= "
        "page_table= softmax_scale= causal= softcap= window_size_left= window_size_right= learnable_sink= tile_mn= "
        "mma_pv_is_rs= intra_wg_overlap= num_threads= num_splits= pack_gqa= _arch= score_mod= mask_mod= "
        "block_sparse_tensors= return_lse= out= lse= aux_tensors= aux_scalars= q_descale= k_descale= v_descale= "
        "gather_kv_indices= scheduler_metadata= seqlen_k_per_split= disable_scheduler_metadata=",
        _CUTE_BACKWARD + "aux_scalars= block_sparse_tensors= dlse= learnable_sink=",
    ),
}
_ENGINE = "max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v "
ENGINE = {
    "2.0": (
        f"is_training {_ENGINE} fake_dtype fused_attention_backend attn_bias= cu_seqlens_q_padded= "
        "cu_seqlens_kv_padded= s_quantizer= o_quantizer= attn_scale= dropout= fast_zero_fill= qkv_layout= "
        "attn_bias_type= attn_mask_type= window_size= rng_gen=",
        f"{_ENGINE} o d_o fake_dtype dqkv_dtype aux_ctx_tensors fused_attention_backend cu_seqlens_q_padded= "
        "cu_seqlens_kv_padded= s_quantizer= dp_quantizer= dqkv_quantizer= attn_scale= dropout= fast_zero_fill= "
        "qkv_layout= attn_bias_type= attn_mask_type= window_size= deterministic=",
    ),
    "2.18": (
        f"is_training {_ENGINE} fake_dtype fused_attention_backend attn_bias= cu_seqlens_q_padded= "
        "cu_seqlens_kv_padded= page_table_k= page_table_v= s_quantizer= o_quantizer= attn_scale= dropout= "
        "fast_zero_fill= qkv_layout= o_format= qkv_scale_inv_format= attn_bias_type= attn_mask_type= softmax_type= "
        "window_size= bottom_right_diagonal= rng_gen= softmax_offset= return_max_logit= cuda_graph=",
        f"{_ENGINE} o d_o fake_dtype aux_ctx_tensors fused_attention_backend cu_seqlens_q_padded= "
        "cu_seqlens_kv_padded= s_quantizer= dp_quantizer= dqkv_quantizer= attn_scale= dropout= fast_zero_fill= "
        "qkv_layout= o_format= do_format= dqkv_layout= qkv_scale_inv_format= do_scale_inv_format= attn_bias_type= "
        "attn_mask_type= softmax_type= window_size= bottom_right_diagonal= deterministic= cuda_graph=",
    ),
}
