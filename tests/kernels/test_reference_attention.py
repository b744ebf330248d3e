import torch
from torch.nn import functional

from inferq.kernels.attention import AttentionBatch
from inferq.kernels.reference import ReferenceAttention


def test_reference_equals_dense_causal_attention_over_the_whole_sequence():
    keys, values, query = torch.randn(3, 20, 2, 64).unbind()
    kv = torch.zeros(3, 1, 2, 16, 2, 64)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 20], dtype=torch.int32),
        seq_lens=torch.tensor([20], dtype=torch.int32),
        block_tables=torch.tensor([[2, 0]], dtype=torch.int32),
        slot_mapping=torch.cat([torch.arange(32, 48), torch.arange(4)]),
        num_decodes=0,
        query_lens=(20,),
        context_lens=(0,),
        block_size=16,
    )
    ops = ReferenceAttention()
    plan = ops.plan(batch)
    ops.write_kv(keys, values, kv[:, 0], plan)
    output = ops.attend(query, kv[:, 0], plan, scale=0.2)

    q, k, v = (x.transpose(0, 1) for x in (query, keys, values))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)
    torch.testing.assert_close(output, expected.transpose(0, 1))


def test_a_window_of_one_attends_to_the_token_itself(make_case):
    case = make_case([(20, 1), (0, 5)], heads=2)
    output, _ = case.run(ReferenceAttention(), window=1)
    torch.testing.assert_close(output, case.value, rtol=0, atol=0)


def test_a_small_soft_cap_flattens_the_weights(make_case):
    case = make_case([(3, 1)], heads=2)
    output, kv = case.run(ReferenceAttention(), soft_cap=1e-6)
    block = int(case.batch.block_tables[0, 0])
    mean = kv[block, 1, 1, :4].mean(dim=0)
    torch.testing.assert_close(output[0], mean, rtol=0, atol=1e-5)
