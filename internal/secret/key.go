package secret

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
)

// keySize is the length of a host key, in bytes: that of AES-256.
const keySize = 32

// Key is the key of this host, with which secrets are encrypted at rest.
type Key struct {
	id   string // says which key it is, and nothing about it
	aead cipher.AEAD
}

// ReadKey reads a key file: 64 hexadecimal digits, readable by its owner alone. Errors name no path.
func ReadKey(path string) (*Key, error) {
	f, err := os.Open(path)
	if err != nil {
		if pe, ok := errors.AsType[*os.PathError](err); ok {
			err = pe.Err
		}
		return nil, fmt.Errorf("the key of secrets cannot be read: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, fmt.Errorf("the key of secrets cannot be read: %w", err)
	case !info.Mode().IsRegular():
		return nil, errors.New("the key of secrets is not a file")
	case info.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("the key of secrets can be read by others (mode %04o): make it 0600", info.Mode().Perm())
	}
	text, err := io.ReadAll(io.LimitReader(f, 1024))
	if err != nil {
		return nil, fmt.Errorf("the key of secrets cannot be read: %w", err)
	}
	raw, err := hex.DecodeString(string(bytes.TrimSpace(text)))
	if err != nil || len(raw) != keySize {
		return nil, fmt.Errorf("the key of secrets is not %d hexadecimal digits, as `openssl rand -hex %d` writes them", 2*keySize, keySize)
	}
	return newKey(raw)
}

func newKey(raw []byte) (*Key, error) {
	block, err := aes.NewCipher(raw)
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(append([]byte("shard: which key of secrets\x00"), raw...))
	return &Key{id: hex.EncodeToString(sum[:4]), aead: aead}, nil
}

// about is what a sealed record belongs to, so that none can be passed off as another.
func about(name string) []byte { return []byte("shard secret 1 " + name) }

func (k *Key) seal(name string, plain []byte) []byte {
	return k.aead.Seal(nil, nil, plain, about(name))
}

func (k *Key) open(name string, sealed []byte) ([]byte, error) {
	plain, err := k.aead.Open(nil, nil, sealed, about(name))
	if err != nil {
		return nil, errors.New("it is damaged, or was encrypted for another name")
	}
	return plain, nil
}
