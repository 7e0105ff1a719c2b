-- What turned NaN or infinite first: all such quantities of each run's first such step; row one is the origin.
-- Source: nonfinite_values_by_step; the order in which a step computes them tells cause from consequence.
-- Tensors that are recorded every k steps may show up later than the loss that they ruined.
CREATE OR REPLACE MACRO first_nonfinite() AS TABLE
WITH ordered_values AS (
    SELECT
        run, rank, step, source, subject, kind, nan_count, infinity_count, order_in_step,
        min(step) OVER (PARTITION BY run) AS first_step
    FROM nonfinite_values_by_step()
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
    order_in_step -- 1 is the origin, the others follow from it
FROM ordered_values
WHERE step = first_step
ORDER BY run, order_in_step;
