package agent

import (
	"github.com/useshards/shard/internal/guest"
)

// The file operations as handlers: arguments, credentials, head, then the work.
func init() {
	handlers[guest.OpPut] = func(r *request) error {
		var args guest.PutArgs
		c, err := argsAndCreds(r, &args, &args.User)
		if err != nil {
			return err
		}
		u, err := beginPut(args, c)
		if err != nil {
			return err
		}
		defer u.close()
		if err := r.Head(nil); err != nil {
			return err
		}
		return u.receive(r)
	}
	handlers[guest.OpGet] = func(r *request) error {
		var args guest.PathArgs
		if err := r.Args(&args); err != nil {
			return err
		}
		d, err := openGet(string(args.Path))
		if err != nil {
			return err
		}
		defer d.Close()
		if err := r.Head(d.entry); err != nil {
			return err
		}
		return d.send(r)
	}
	handlers[guest.OpStat] = func(r *request) error {
		var args guest.PathArgs
		if err := r.Args(&args); err != nil {
			return err
		}
		entry, err := statPath(string(args.Path))
		if err != nil {
			return err
		}
		return r.Head(entry)
	}
	handlers[guest.OpList] = func(r *request) error {
		var args guest.PathArgs
		if err := r.Args(&args); err != nil {
			return err
		}
		dir, names, err := openDir(string(args.Path))
		if err != nil {
			return err
		}
		defer closeAll(dir)
		if err := r.Head(nil); err != nil {
			return err
		}
		return writeEntries(r, dir, names)
	}
	handlers[guest.OpMkdir] = func(r *request) error {
		var args guest.MkdirArgs
		c, err := argsAndCreds(r, &args, &args.User)
		if err != nil {
			return err
		}
		return mkdir(args, c)
	}
	handlers[guest.OpRemove] = func(r *request) error {
		var args guest.RemoveArgs
		c, err := argsAndCreds(r, &args, &args.User)
		if err != nil {
			return err
		}
		return remove(args, c, r.Gone())
	}
	handlers[guest.OpUntar] = func(r *request) error {
		var args guest.UntarArgs
		c, err := argsAndCreds(r, &args, &args.User)
		if err != nil {
			return err
		}
		x, err := beginUntar(args, c)
		if err != nil {
			return err
		}
		defer x.close()
		if err := r.Head(nil); err != nil {
			return err
		}
		return x.extract(r)
	}
	handlers[guest.OpTar] = func(r *request) error {
		var args guest.PathArgs
		if err := r.Args(&args); err != nil {
			return err
		}
		entry, a, err := openTar(string(args.Path))
		if err != nil {
			return err
		}
		defer a.close()
		if err := r.Head(entry); err != nil {
			return err
		}
		return a.write(r)
	}
}

// argsAndCreds decodes args, and looks up the user that they then name.
func argsAndCreds(r *request, args any, user *string) (creds, error) {
	if err := r.Args(args); err != nil {
		return creds{}, err
	}
	return credsOf(*user)
}
