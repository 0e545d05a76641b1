//! Keys of a terminal, one by one and without echo.

use std::io::{Write as _, stdin, stdout};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};

/// `_POSIX_VDISABLE` of Linux: no character has this meaning.
const DISABLED: u8 = 0;

/// Key with a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// `q`.
    Quit,
    /// Space.
    Update,
    /// `s`.
    Order,
}

/// Keys of standard input, with a screen of its own on standard output; both as before when this is
/// dropped.
pub struct Keys {
    before: Termios,
}

impl Keys {
    /// Takes both over. Ctrl-C stays a signal.
    pub fn take() -> anyhow::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut now = before.clone();
        now.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        // No stop and no core: the shell would have this screen.
        now.special_codes[SpecialCodeIndex::VSUSP] = DISABLED;
        now.special_codes[SpecialCodeIndex::VQUIT] = DISABLED;
        tcsetattr(stdin(), OptionalActions::Now, &now)?;
        let keys = Self { before };
        // The alternate screen, without a cursor, and with long lines cut off.
        screen("\x1b[?1049h\x1b[?25l\x1b[?7l")?;
        Ok(keys)
    }

    /// The next key; `None` where none with a meaning comes within `wait`.
    ///
    /// # Errors
    /// Standard input ends, or cannot be read.
    pub fn next(&self, wait: Duration) -> anyhow::Result<Option<Key>> {
        let input = stdin();
        let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&input, PollFlags::IN)], Some(&wait)) {
            Ok(0) | Err(Errno::INTR) => return Ok(None),
            Ok(_) => {}
            Err(e) => return Err(e.into()),
        }
        let mut byte = [0_u8];
        match read(&input, &mut byte) {
            Ok(0) => anyhow::bail!("standard input has ended"),
            Ok(_) => Ok(meaning(byte[0])),
            Err(Errno::INTR | Errno::AGAIN) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // A terminal that is gone needs neither.
        let _ = screen("\x1b[?7h\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

fn screen(codes: &str) -> std::io::Result<()> {
    let mut out = stdout().lock();
    out.write_all(codes.as_bytes())?;
    out.flush()
}

fn meaning(byte: u8) -> Option<Key> {
    match byte {
        b'q' | b'Q' => Some(Key::Quit),
        b' ' => Some(Key::Update),
        b's' => Some(Key::Order),
        _ => None,
    }
}
