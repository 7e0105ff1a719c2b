-- Do the weight matrices shrink together to a fraction of their first size?
-- Source: decoupled decay multiplies every matrix by 1 - rate * decay at each step (Loshchilov & Hutter 2019); only
-- where that outweighs the gradients' pull do all of them shrink at once. At 0.1 the reference model's stay within a
-- fifth.
CREATE OR REPLACE MACRO weight_decay_too_strong(
    norm_threshold := 0.7 -- 1, median over matrices of norm / first norm; 0.9 in the reference model
) AS TABLE
WITH norms AS (
    SELECT
        run, step,
        median(relative_norm) AS relative_norm,
        count(*) FILTER (WHERE relative_norm < norm_threshold) AS shrunk_count,
        count(*) AS matrix_count,
        min(relative_norm) AS least_norm,
        arg_min(name, relative_norm) AS name
    FROM weight_gain_by_step()
    WHERE isfinite(relative_norm)
    GROUP BY run, step
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    arg_min(name, relative_norm) AS subject, -- matrix that shrinks most
    min(relative_norm) AS observed, -- 1, smallest median over matrices
    any_value(CAST(norm_threshold AS DOUBLE)) AS threshold, -- 1
    format(
        '{} of {} matrices below it at step {}; the smallest has {:.3g} of its first norm',
        arg_min(shrunk_count, relative_norm), arg_min(matrix_count, relative_norm), arg_min(step, relative_norm),
        min(least_norm)
    ) AS detail -- text
FROM norms
WHERE relative_norm < norm_threshold
GROUP BY run
ORDER BY run;
