-- Does attention see exactly one key too many, the next token, although the run declares a causal mask?
-- Source: an exact invariant. Mass on later keys is proof; none beyond the next key anywhere names the diagonal.
-- Mean entropy looks normal, but query 0, which has one legal key, has two (first_row_entropy > 0).
CREATE OR REPLACE MACRO causal_mask_off_by_one(
    mass_threshold := 0.0 -- 0..1; the invariant is exact, so there is nothing to tolerate
) AS TABLE
WITH heads AS (
    SELECT
        attention.run, step, layer, head, future_mass, first_row_entropy,
        count(DISTINCT (layer, head)) OVER (PARTITION BY attention.run) AS all_head_count,
        max(future_mass_beyond_next) FILTER (WHERE isfinite(future_mass_beyond_next))
            OVER (PARTITION BY attention.run) AS beyond_next
    FROM attention
    JOIN runs ON runs.run = attention.run AND runs.mask_type = 'causal'
    WHERE rank = 0
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    format('layer {} head {}', arg_max(layer, future_mass), arg_max(head, future_mass)) AS subject, -- most mass
    max(future_mass) AS observed, -- 0..1, attention that a real query gives to the next key
    any_value(CAST(mass_threshold AS DOUBLE)) AS threshold, -- 0..1
    format(
        '{} of {} heads see the next key and none beyond it',
        count(DISTINCT (layer, head)), any_value(all_head_count)
    ) || coalesce(
        format(
            '; query 0 spreads over two keys, entropy {:.3g} nats',
            max(first_row_entropy) FILTER (WHERE isfinite(first_row_entropy) AND first_row_entropy > 0)
        ), ''
    ) AS detail -- text
FROM heads
WHERE isfinite(future_mass) AND future_mass > mass_threshold AND beyond_next <= mass_threshold
GROUP BY run
ORDER BY run;
