-- What each attention head does: how spread out it is, and whether it sees the future.
-- Source: attention, from the probabilities that multiplied the values; rank 0.
CREATE OR REPLACE MACRO attention_by_step() AS TABLE
SELECT
    run, -- run directory
    step, -- optimizer updates
    layer, -- index of the block
    head, -- index of the head
    CAST(entropy AS DOUBLE) AS entropy, -- 0..1, entropy of a row / ln(its allowed keys)
    CAST(first_row_entropy AS DOUBLE) AS first_row_entropy, -- nats; query 0 has one legal key under a causal mask
    future_mass, -- 0..1, exactly 0 under a causal mask
    future_mass_beyond_next, -- 0..1, the same without the next key
    CAST(max_abs_logit AS DOUBLE) AS max_abs_logit -- nats
FROM attention
WHERE rank = 0
ORDER BY run, step, layer, head;
