//! Every fuzzing input worth keeping, run through the same functions (`fuzz/`).

#[path = "../../../fuzz/src/json.rs"]
mod json;
#[path = "../../../fuzz/src/learned.rs"]
mod learned;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;
use rtvirtio_model::HostModel;

#[test]
fn learned() {
    replay("learned", learned::play);
}

/// Files of earlier versions name some fields otherwise.
#[test]
fn a_model_with_older_names_is_read() {
    for text in learned::documents() {
        let older = text.replace("\"secondary_targets\"", "\"companions\"");
        let older = older.replace("\"non_idling\"", "\"flowing\"");
        assert_ne!(&older, text);
        let (older, model) = (HostModel::from_json(&older).unwrap(), HostModel::from_json(text).unwrap());
        assert_eq!(older, model);
    }
}
