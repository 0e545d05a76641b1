use super::*;

fn dev() -> String {
    "7:0".into()
}

#[test]
fn values_and_texts_of_each_form() {
    let max = Form::IoMax { dev: dev(), key: "riops".into() };
    for (form, file, value, text) in [
        (Form::Plain, "8\n", "8", "8"),
        (Form::Jiffies, "124\n", "124", "124"),
        (Form::Elevator, "none [bfq] \n", "bfq", "bfq"),
        (Form::DeviceWeight { dev: dev() }, "default 100\n7:0 400\n", "400", "7:0 400"),
        (Form::DeviceWeight { dev: dev() }, "default 100\n", "default", "7:0 default"),
        (Form::Throttle { dev: dev() }, "7:0 1000\n", "1000", "7:0 1000"),
        (Form::Throttle { dev: dev() }, "", "max", "7:0 0"),
        (max.clone(), "7:0 rbps=max wbps=max riops=5 wiops=max\n", "5", "7:0 riops=5"),
        (max, "", "max", "7:0 riops=max"),
        (Form::IoEnabled, "cpu io\n", "+io", "+io"),
        (Form::IoEnabled, "cpu\n", "-io", "-io"),
    ] {
        assert_eq!(form.value(file).as_deref(), Some(value), "{form:?}");
        assert_eq!(form.text(value), text, "{form:?}");
    }
}

#[test]
fn unknown_texts_have_no_value() {
    assert_eq!(Form::Elevator.value("none bfq"), None);
    assert_eq!(Form::DeviceWeight { dev: dev() }.value("what is this"), None);
}

#[test]
fn comparison_is_by_meaning_and_tight() {
    assert!(Form::Jiffies.is("128", "125"));
    assert!(!Form::Jiffies.is("124", "125"));
    assert!(Form::Plain.is("8", "08"));
    assert!(!Form::Plain.is("128", "125"));
    assert!(!Form::Elevator.is("none", "bfq"));
}
