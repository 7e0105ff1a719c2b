-- Did a trainable weight stay bit for bit the same although it got a gradient and a learning rate?
-- Source: content hashes. An update that is not zero changes some bit of some element of a tensor.
-- A tensor without any gradient is detached_branch's; a declared freeze is trainable = false.
CREATE OR REPLACE MACRO frozen_layer(
    least_span_steps := 3, -- steps over which the hash stays
    -- Spacing of float32 below 1: an Adam update of size learning_rate to a gain of 1 would round away below it.
    least_learning_rate := 6e-8, -- 1
    least_gradient := 1e-7 -- root mean square; ten epsilons of Adam, below which its updates round away as well
) AS TABLE
WITH changes AS (
    SELECT
        run, segment, step, tensor_id, content_hash,
        content_hash IS DISTINCT FROM lag(content_hash) OVER rows_of_tensor AS is_new
    FROM tensors
    WHERE kind = 'weight' AND rank = 0 AND content_hash IS NOT NULL
    WINDOW rows_of_tensor AS (PARTITION BY run, segment, tensor_id ORDER BY step)
),
numbered AS (
    SELECT
        run, segment, step, tensor_id,
        count(*) FILTER (WHERE is_new) OVER (PARTITION BY run, segment, tensor_id ORDER BY step) AS stretch
    FROM changes
),
stretches AS (
    SELECT run, segment, tensor_id, min(step) AS start_step, max(step) AS end_step
    FROM numbered
    GROUP BY run, segment, tensor_id, stretch
    HAVING max(step) - min(step) >= any_value(least_span_steps)
),
rates AS (
    SELECT stretches.run, stretches.segment, tensor_id, start_step, max(learning_rate) AS learning_rate
    FROM stretches
    JOIN steps ON steps.run = stretches.run AND steps.segment = stretches.segment AND rank = 0
        AND steps.step >= start_step AND steps.step < end_step AND isfinite(learning_rate)
    GROUP BY ALL
),
pulls AS (
    SELECT stretches.run, stretches.segment, stretches.tensor_id, start_step, max(l2_norm) AS gradient_norm,
        max(l2_norm / sqrt(nullif(element_count, 0))) AS gradient_size
    FROM stretches
    JOIN tensors AS gradient ON gradient.run = stretches.run AND gradient.segment = stretches.segment
        AND gradient.tensor_id = stretches.tensor_id AND gradient.kind = 'gradient' AND gradient.rank = 0
        AND gradient.step >= start_step AND gradient.step < end_step AND isfinite(l2_norm)
    GROUP BY ALL
),
frozen AS (
    SELECT run, start_step, end_step, tensor_id, tensor_names.name, learning_rate, gradient_norm
    FROM stretches
    JOIN rates USING (run, segment, tensor_id, start_step)
    JOIN pulls USING (run, segment, tensor_id, start_step)
    JOIN tensor_names USING (run, segment, tensor_id)
    WHERE trainable IS DISTINCT FROM false
        AND tensor_names.rank = 0
        AND learning_rate > least_learning_rate
        AND gradient_size > least_gradient
)
SELECT
    run, -- run directory
    start_step AS first_step, -- optimizer updates
    max(end_step) AS last_step, -- optimizer updates
    arg_min(name, tensor_id) || CASE WHEN count(*) > 1 THEN format(' and {} more', count(*) - 1) ELSE '' END
        AS subject, -- tensors that stopped at the same step
    CAST(max(end_step) - start_step AS DOUBLE) AS observed, -- steps without any change
    any_value(CAST(least_span_steps AS DOUBLE)) AS threshold, -- steps
    format(
        'unchanged from step {} to {} at a learning rate of up to {:.3g} and gradient norms of up to {:.3g}: {}',
        start_step, max(end_step), max(learning_rate), max(gradient_norm),
        array_to_string(list(name ORDER BY tensor_id)[1:6], ', ') || CASE WHEN count(*) > 6 THEN ', ...' ELSE '' END
    ) AS detail -- text
FROM frozen
GROUP BY run, start_step
ORDER BY run, start_step;
