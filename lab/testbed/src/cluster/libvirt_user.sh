# libvirt_user DIRECTORY, in a mount namespace: libvirt wants this user by name, whatever its
# configuration says, and its package without the service does not make it.
libvirt_user() {
  for f in passwd group; do
    if ! grep -q '^libvirt-qemu:' /etc/$f; then
      cp /etc/$f "$1/$f"
      echo 'libvirt-qemu:x:64055:64055::/:/usr/sbin/nologin' >>"$1/$f"
      mount --bind "$1/$f" /etc/$f
    fi
  done
}
