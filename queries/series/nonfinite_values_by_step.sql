-- Every recorded quantity that held a NaN or an infinity, in the order in which a training step computes them.
-- Source: counts of tensors, values of steps and evaluations. Within a step: weight, activation, loss, gradient,
-- update; activations from the input on, gradients from the output back. -inf in masked logits is never logged.
CREATE OR REPLACE MACRO nonfinite_values_by_step() AS TABLE
WITH tensor_values AS (
    SELECT
        tensors.run, rank, step, 'tensors' AS source, coalesce(name, format('tensor {}', tensor_id)) AS subject, kind,
        coalesce(nan_count, 0) AS nan_count,
        coalesce(positive_infinity_count, 0) + coalesce(negative_infinity_count, 0) AS infinity_count,
        CASE WHEN kind IN ('gradient', 'activation_gradient') THEN -tensor_id ELSE tensor_id END AS place
    FROM tensors
    LEFT JOIN tensor_names USING (run, rank, segment, tensor_id)
    WHERE nan_count > 0 OR positive_infinity_count > 0 OR negative_infinity_count > 0
),
step_values AS (
    UNPIVOT (
        SELECT run, rank, step, train_loss, objective, gradient_norm, clipped_gradient_norm
        FROM steps
        WHERE NOT isfinite(train_loss) OR NOT isfinite(objective)
            OR NOT isfinite(gradient_norm) OR NOT isfinite(clipped_gradient_norm)
    ) ON train_loss, objective, gradient_norm, clipped_gradient_norm
    INTO NAME subject VALUE value
),
evaluation_values AS (
    SELECT run, rank, step, split AS subject, loss_sum AS value
    FROM evaluations
    WHERE NOT isfinite(loss_sum)
),
scalar_values AS (
    SELECT
        run, rank, step, 'steps' AS source, subject,
        CASE WHEN subject LIKE '%norm' THEN 'gradient' ELSE 'loss' END AS kind, value, 2 AS place
    FROM step_values
    WHERE NOT isfinite(value)
    UNION ALL
    SELECT run, rank, step, 'evaluations' AS source, subject, 'loss' AS kind, value, 1 AS place
    FROM evaluation_values
),
all_values AS (
    SELECT run, rank, step, source, subject, kind, nan_count, infinity_count, place
    FROM tensor_values
    UNION ALL
    SELECT
        run, rank, step, source, subject, kind,
        CAST(isnan(value) AS BIGINT) AS nan_count, CAST(isinf(value) AS BIGINT) AS infinity_count, place
    FROM scalar_values
),
ordered_values AS (
    SELECT
        run, rank, step, source, subject, kind, nan_count, infinity_count,
        row_number() OVER (
            PARTITION BY run, step
            ORDER BY
                list_position(
                    ['weight', 'activation', 'loss', 'activation_gradient', 'gradient', 'update'], kind
                ),
                source = 'steps', place, subject, rank
        ) AS order_in_step
    FROM all_values
)
SELECT
    run, -- run directory
    rank, -- process of a distributed run, from 0
    step, -- optimizer updates
    source, -- table: tensors, steps or evaluations
    subject, -- name of the tensor, column of steps, or split
    kind, -- weight, activation, loss, activation_gradient, gradient or update
    nan_count, -- elements that are NaN
    infinity_count, -- elements that are +inf or -inf
    order_in_step -- 1, 2, ...: the order in which the step computes them
FROM ordered_values
ORDER BY run, step, order_in_step;
