# mount_point DIRECTORY PATH, in a mount namespace: makes a directory to mount on where the package
# leaves it to systemd (Corosync 3.1.10 does). The machine's own file system stays as it is.
mount_point() {
  [ ! -d "$2" ] || return 0
  mkdir -p "$1$2"
  mount -t overlay -o "lowerdir=$1${2%/*}:${2%/*}" overlay "${2%/*}"
}
