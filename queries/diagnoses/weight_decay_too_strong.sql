-- Do the weight matrices shrink together, fast or to a fraction of their first size?
-- Source: decoupled decay multiplies every matrix by 1 - rate * decay at each step (Loshchilov & Hutter 2019); only
-- where that outweighs the gradients' pull do all of them shrink at once. At a rate of 0.003 and a decay of 0.1 that
-- is 0.0003 a step at most, and the reference model's stay within a fifth. Matrices that a far too high learning rate
-- made grow shrink fast with its schedule, but not below their first size.
CREATE OR REPLACE MACRO weight_decay_too_strong(
    norm_threshold := 0.7, -- 1, median over matrices of norm / first norm; 0.9 in the reference model
    rate_threshold := 0.001, -- 1/step, at which the median shrinks, at two records; up to 0.0005 in healthy runs
    rate_norm_threshold := 0.95, -- 1, norm / first norm below which a fast shrinking counts
    rate_steps := 50 -- optimizer updates that the rate is over, at least
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
),
falls AS (
    SELECT later.*, ln(earlier.relative_norm / later.relative_norm) / (later.step - earlier.step) AS rate
    FROM norms AS later
    ASOF LEFT JOIN norms AS earlier
        ON earlier.run = later.run AND earlier.step <= later.step - rate_steps
),
judged AS (
    SELECT
        *,
        relative_norm < norm_threshold AS is_small,
        coalesce(
            relative_norm < rate_norm_threshold
                AND rate > rate_threshold
                AND lag(rate) OVER (PARTITION BY run ORDER BY step) > rate_threshold,
            false
        ) AS is_fast
    FROM falls
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    arg_min(name, relative_norm) AS subject, -- matrix that shrinks most
    CASE WHEN bool_or(is_small) THEN min(relative_norm) ELSE max(rate) END
        AS observed, -- 1: smallest median over matrices; where none is small enough, 1/step: fastest fall
    any_value(CAST(CASE WHEN is_small THEN norm_threshold ELSE rate_threshold END AS DOUBLE)
        ORDER BY is_small DESC) AS threshold, -- of the same
    format(
        'the median matrix has {:.3g} of its first norm at step {}, {} of {} below {:.3g}, the smallest {:.3g}',
        min(relative_norm), arg_min(step, relative_norm), arg_min(shrunk_count, relative_norm),
        arg_min(matrix_count, relative_norm), any_value(norm_threshold), min(least_norm)
    ) || coalesce(format(
        '; it shrinks by up to {:.2g}% a step, at step {}', 100 * max(rate), arg_max(step, rate)
    ), '') AS detail -- text
FROM judged
WHERE is_small OR is_fast
GROUP BY run
ORDER BY run;
