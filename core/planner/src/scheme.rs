//! Names of schemes: ids in files, display names for users.

use rtvirtio_model::ModelKind;

/// Id of the scheme that plans with a model.
#[must_use]
pub fn scheme_of(model: ModelKind) -> &'static str {
    match model {
        ModelKind::Slice => "slice",
        ModelKind::Bound => "bound",
    }
}

/// The display name of a scheme. Files and ids of claims keep the id; unknown ids, such as those of
/// plans that users write, are their own names.
#[must_use]
pub fn scheme_name(id: &str) -> &str {
    match id {
        "default-bfq" => "kernel default",
        "rt-xen" => "rt-xen (mimic)",
        "rt-virtio-analytical" => "paper (equations)",
        "rt-virtio-mlp" => "paper (network)",
        "slice" => "rtvirtio",
        "bound" => "rtvirtio (bound)",
        "io-cost" => "io.cost",
        "io-latency" => "io.latency",
        "tuned" => "rtvirtio (tuned)",
        _ => id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_has_a_display_name() {
        for id in [ModelKind::Slice, ModelKind::Bound].map(scheme_of) {
            assert_ne!(scheme_name(id), id);
        }
        assert_eq!(scheme_name("by-hand"), "by-hand");
    }
}
