//! The page in a real browser, on the real service.

mod common;

use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::browser::{BROWSER, Browser};
use common::busy::BusyPlant;
use common::{Rig, answer, contract_of_none, free_address};
use rtvirtio_testkit::site::{project, wait_for};
use rtvirtio_testkit::{ChildGuard, Need, has};

/// The names in the table of contracts, in its order.
fn rows(page: &mut Browser) -> Vec<String> {
    page.texts("#vms tbody td:first-child")
}

#[test]
fn the_page_answers_clicks_and_keys_follows_the_service_and_finds_it_again() {
    let test = "the_page_answers_clicks_and_keys_follows_the_service_and_finds_it_again";
    if !has(test, &[Need::Root, BROWSER]) {
        return;
    }
    let mut rig = Rig::new();
    contract_of_none(&rig, "plc");
    contract_of_none(&rig, "hist");
    let address = free_address();
    rig.start(&["--listen", &address]);
    let mut page = Browser::open(&format!("http://{address}/"), 1100, 900);
    page.wait("document.querySelectorAll('#vms tbody tr').length === 2");
    page.wait("document.getElementById('link').textContent === 'live'");
    assert_eq!(page.eval("document.getElementById('none').hidden"), true);

    // A row opens its detail, which takes the focus; `Close` and a key close it.
    assert_eq!(page.eval("document.getElementById('detail').hidden"), true);
    page.click("#vms tr[data-vm=plc]");
    page.wait("document.activeElement.id === 'detail-title'");
    assert_eq!(page.texts("#detail-title"), ["plc"]);
    let targets = page.texts("#detail-body tbody td, #detail-body tr:not(:first-child) td");
    assert!(targets.iter().any(|text| text == "p99 ≤ 10.0 ms"), "{targets:?}");
    page.wait("document.getElementById('detail-body').innerText.includes('none')");
    page.click("#close");
    page.wait("document.getElementById('detail').hidden");
    page.key("j");
    page.key("j");
    page.key("Enter");
    page.wait("document.getElementById('detail-title').textContent === 'plc'");
    page.key("Escape");
    page.wait("document.getElementById('detail').hidden");

    // What comes in between press and release takes nothing away: not the click, the focus or
    // selected text.
    let comes = |page: &mut Browser| {
        page.eval("window.before = state.seen");
        page.wait("state.seen !== before && !drawing");
    };
    comes(&mut page);
    let place = page.press("#vms tr[data-vm=plc]");
    comes(&mut page);
    page.release(&place);
    page.wait("document.activeElement.id === 'detail-title'");
    page.wait("document.getElementById('detail-body').innerText.includes('none')");
    page.eval("getSelection().selectAllChildren(document.querySelector('#detail-body p'))");
    let selected = page.eval("getSelection().toString()");
    page.eval("document.querySelector('#vms tr[data-vm=hist]').focus({ preventScroll: true })");
    comes(&mut page);
    assert_eq!(page.eval("getSelection().toString()"), selected);
    assert!(!selected.as_str().unwrap().is_empty());
    assert_eq!(page.eval("document.activeElement.dataset.vm"), "hist");
    contract_of_none(&rig, "aaa");
    page.wait("document.querySelector('#vms tr[data-vm=aaa]')");
    fs::remove_file(rig.contracts().join("aaa.toml")).unwrap();
    page.wait("!document.querySelector('#vms tr[data-vm=aaa]')");
    assert_eq!(page.eval("document.activeElement.dataset.vm"), "hist");
    page.key("Escape");
    page.wait("document.getElementById('detail').hidden");

    // The filter takes part of a name, or of a state.
    page.key("/");
    page.write("PL");
    page.wait("document.querySelectorAll('#vms tbody tr').length === 1");
    assert_eq!(rows(&mut page), ["plc"]);
    page.eval("document.getElementById('filter').select()");
    page.write("no such");
    page.wait("document.querySelectorAll('#vms tbody tr').length === 0");
    page.eval("document.getElementById('filter').select()");
    page.write("off");
    page.wait("document.querySelectorAll('#vms tbody tr').length === 2");
    page.key("Escape");

    // A contract that is set while the page is open; and a file with a mistake, whose text must not
    // become markup.
    contract_of_none(&rig, "new");
    page.eval("document.getElementById('filter').select()");
    page.call(
        "Input.dispatchKeyEvent",
        &serde_json::json!({ "type": "rawKeyDown", "windowsVirtualKeyCode": 8, "key": "Backspace" }),
    );
    page.wait("document.querySelector('#vms tr[data-vm=new]')");
    fs::write(rig.contracts().join("broken.toml"), "<b>x</b>").unwrap();
    page.wait("document.getElementById('faults').textContent.includes('broken.toml is not used')");
    page.wait("document.getElementById('events').textContent.includes('broken.toml')");
    assert_eq!(
        page.eval("document.body.innerText.includes('<b>x</b>') && !document.querySelector('b')"),
        true
    );
    fs::remove_file(rig.contracts().join("broken.toml")).unwrap();
    page.wait("document.getElementById('faults').textContent === ''");

    // The timeline by kind.
    page.eval("(() => { const kind = document.getElementById('kind'); kind.value = 'fault'; kind.dispatchEvent(new Event('change')); })()");
    page.wait("[...document.querySelectorAll('#events > li > span:nth-of-type(1)')].every((one) => one.textContent === 'fault')");
    page.eval("(() => { const kind = document.getElementById('kind'); kind.value = ''; kind.dispatchEvent(new Event('change')); })()");

    // Killed, what was known stays and is said to be old; started again it is live again, with what
    // happened meanwhile, and no event twice.
    rig.kill();
    page.wait("document.getElementById('link').textContent.startsWith('not connected')");
    assert_eq!(rows(&mut page).len(), 3);
    contract_of_none(&rig, "late");
    rig.start(&["--listen", &address]);
    page.wait("document.getElementById('link').textContent === 'live'");
    page.wait("document.querySelector('#vms tr[data-vm=late]')");
    let begins = "[...document.querySelectorAll('#events > li')].filter((one) => one.innerText.includes('service started'))";
    page.wait(&format!("{begins}.length === 2"));
    let once = "new Set(state.events.map((one) => one.id + one.time)).size === state.events.length";
    assert_eq!(page.eval(once), true, "{}", page.eval("state.events"));
    assert!(page.faults.is_empty(), "{:#?}", page.faults);

    // A copy needs no service and no network; the bare files say what they lack.
    let (status, copy) = answer(UnixStream::connect(rig.socket()).unwrap(), "GET", "/copy.html", "localhost");
    assert_eq!(status, 200);
    rig.kill();
    drop(page);
    let file = rig.site.dir.path().join("copy.html");
    fs::write(&file, copy).unwrap();
    let mut page = Browser::open(&format!("file://{}", file.display()), 1100, 900);
    page.wait("document.getElementById('link').textContent.startsWith('a copy of')");
    page.wait("document.querySelectorAll('#vms tbody tr').length === 4");
    page.wait("document.getElementById('events').textContent.includes('service started')");
    page.click("#vms tr[data-vm=plc]");
    page.wait("document.getElementById('detail-body').innerText.includes('none')");
    assert!(page.faults.is_empty(), "{:#?}", page.faults);
    drop(page);
    let bare = project().join("control/daemon/page/index.html");
    let mut page = Browser::open(&format!("file://{}", bare.display()), 1100, 900);
    page.wait("document.getElementById('link').textContent.startsWith('this file has no data')");
    assert!(page.faults.is_empty(), "{:#?}", page.faults);
    drop(page);

    // A stream of events that comes in pieces, for where there is no EventSource.
    let mut page = Browser::open(&format!("file://{}", file.display()), 1100, 900);
    page.wait("document.getElementById('link').textContent.startsWith('a copy of')");
    page.eval(
        "(() => { window.got = []; const take = parser({ status: (data) => got.push(JSON.parse(data).n), event: (data) => got.push(data) }); \
         for (const piece of [': alive\\n\\nevent: st', 'atus\\ndata: {\"n\"', ':7}\\n\\nid: 1\\nevent: event\\ndata: a\\ndata: b\\n', '\\n']) take(piece); })()",
    );
    assert_eq!(page.eval("JSON.stringify(got)"), "[7,\"a\\nb\"]");
}

/// Cockpit's web server, in namespaces: the service's directory is where an installation has it,
/// and the bus and the agent that Cockpit starts go with it.
const COCKPIT: &str = r#"
mount --make-rprivate / && mount -t tmpfs none /run && mkdir /run/rtvirtio /run/home || exit
mount --bind "$1" /run/rtvirtio && mount --bind "$2" /run/home || exit
mount -t tmpfs none /tmp && mount -t proc none /proc || exit
export HOME=/run/home XDG_DATA_HOME=/run/home
exec /usr/lib/cockpit/cockpit-ws --no-tls --address 127.0.0.1 --port "$3" --local-session cockpit-bridge
"#;

/// The server of one session; `home` has the page's files where Cockpit looks for a user's own.
fn cockpit(run: &Path, home: &Path, address: &str) -> ChildGuard {
    let mut server = Command::new("unshare");
    server.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", COCKPIT, "sh"]);
    server.arg(run).arg(home).arg(address.rsplit(':').next().unwrap());
    server.stdin(Stdio::null()).stderr(Stdio::null());
    let server = ChildGuard(server.spawn().unwrap());
    wait_for("Cockpit", || TcpStream::connect(address).is_ok());
    server
}

#[test]
fn the_page_works_inside_cockpit() {
    let test = "the_page_works_inside_cockpit";
    let needs =
        [Need::Program("cockpit-bridge"), Need::Path("/usr/lib/cockpit/cockpit-ws", "no package cockpit-ws")];
    if !has(test, &[&[Need::Root, BROWSER][..], &needs].concat()) {
        return;
    }
    let mut rig = Rig::new();
    contract_of_none(&rig, "plc");
    rig.start(&[]);
    // As the package installs it.
    let home = rig.site.dir.path().join("home");
    let files = home.join("cockpit/rtvirtio");
    fs::create_dir_all(&files).unwrap();
    let index = Command::new("sh").arg(project().join("packaging/cockpit/index.sh")).output().unwrap();
    fs::write(files.join("index.html"), index.stdout).unwrap();
    fs::copy(project().join("packaging/cockpit/manifest.json"), files.join("manifest.json")).unwrap();
    for name in ["app.css", "app.js", "transport.js"] {
        fs::copy(project().join("control/daemon/page").join(name), files.join(name)).unwrap();
    }
    let address = free_address();
    let _cockpit = cockpit(&rig.site.run_dir(), &home, &address);
    let mut page =
        Browser::open(&format!("http://{address}/cockpit/@localhost/rtvirtio/index.html"), 1100, 900);
    page.wait("document.getElementById('link').textContent === 'live'");
    page.wait("document.querySelector('#vms tr[data-vm=plc]')");
    page.wait("document.getElementById('events').textContent.includes('service started')");
    page.click("#vms tr[data-vm=plc]");
    page.wait("document.getElementById('detail-body').innerText.includes('none')");
    assert_eq!(page.eval("transport.text('copy.html').then((text) => text.includes('id=\"saved\"'))"), true);
    // Live, and found again.
    contract_of_none(&rig, "new");
    page.wait("document.querySelector('#vms tr[data-vm=new]')");
    rig.kill();
    page.wait("document.getElementById('link').textContent.startsWith('not connected')");
    rig.start(&[]);
    page.wait("document.getElementById('link').textContent === 'live'");
    assert!(page.faults.is_empty(), "{:#?}", page.faults);
}

/// Where pictures go: `RTVIRTIO_PICTURES`, seen from the project's directory, or the build's
/// directory of temporary files.
fn pictures() -> PathBuf {
    let dir = std::env::var_os("RTVIRTIO_PICTURES");
    let dir =
        dir.map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned(), |dir| project().join(dir));
    fs::create_dir_all(&dir).unwrap();
    dir
}

#[test]
fn the_page_shows_a_plan_latencies_and_waits_in_both_colours_and_on_a_phone() {
    let test = "the_page_shows_a_plan_latencies_and_waits_in_both_colours_and_on_a_phone";
    if !has(test, &[Need::Root, BROWSER]) {
        return;
    }
    let Some(mut plant) = BusyPlant::new(test) else { return };
    let address = free_address();
    plant.rig.start(&["--listen", &address]);
    let mut page = Browser::open(&format!("http://{address}/"), 1100, 900);
    page.wait("document.querySelector('#vms tr[data-vm=plc]')");
    page.click("#vms tr[data-vm=plc]");
    page.wait("document.querySelector('#detail-body svg rect.read')");
    page.wait("document.getElementById('plan-body').textContent.startsWith('in force')");
    page.wait("document.querySelector('#waits table')");
    // Enough for a verdict, and for a percentile that deserves its name.
    page.wait("state.seen.vms.plc.targets[0].n > 1000");
    page.wait("document.querySelector('#detail-body td:nth-child(5)').textContent.includes(' of ')");
    page.wait("document.querySelector('#vms tr[data-vm=hist]').textContent.includes('1 missed')");
    // The picture names directories as an installation has them, and nothing is drawn anew.
    let dir = plant.rig.site.dir.path().display().to_string();
    page.eval(&format!(
        "requestAnimationFrame = () => {{}}; const texts = document.createNodeIterator(document.body, NodeFilter.SHOW_TEXT); \
         for (let one; (one = texts.nextNode());) one.textContent = one.textContent.replaceAll({dir:?}, '/etc/rtvirtio')"
    ));
    for (name, is_dark) in [("service-page.png", false), ("service-page-dark.png", true)] {
        page.set_dark(is_dark);
        let picture = page.picture(&pictures().join(name), "#detail");
        assert!(fs::read(picture).unwrap().starts_with(b"\x89PNG"));
    }
    // Nothing is wider than a phone but what scrolls by itself.
    page.resize(390, 800);
    page.picture(&pictures().join("service-page-phone.png"), "footer");
    assert_eq!(page.eval("document.documentElement.scrollWidth <= 390"), true);
    assert!(page.faults.is_empty(), "{:#?}", page.faults);
    drop(page);
    plant.end();
}
